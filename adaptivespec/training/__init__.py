"""Training an EAGLE-3 head for a target: generate, train, evaluate."""
