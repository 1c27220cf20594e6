"""`adaptivespec bench`: arms side by side over prompt sets, and what a reader needs to decide."""
