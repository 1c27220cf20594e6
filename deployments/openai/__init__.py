"""The OpenAI API over HTTP, for any `Backend`. Knows FastAPI; nothing of Ray."""
