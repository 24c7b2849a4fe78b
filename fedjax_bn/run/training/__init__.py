"""Training: the rounds of a run, what is recorded of them, and populations on disk."""
