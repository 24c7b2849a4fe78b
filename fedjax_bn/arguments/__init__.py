"""Checks arguments, chooses functions by a word, and prepares texts for messages."""
