"""Checks arguments, chooses functions with arguments by a word, and prepares texts for messages.

This package imports no other: `ranges` checks signatures, `choices` reads `name:key=value`, and
`text` prepares what is printed, written or used as the name of a file.
"""
