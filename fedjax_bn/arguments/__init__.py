"""What an argument may be, how a word chooses a function with arguments, and texts in messages.

This room is below all others: `ranges` for signatures, `choices` for `name:key=value`, `text` for
what is printed, written and used as the name of a file.
"""
