"""The loop over rounds, evaluation, and what happens between rounds."""
