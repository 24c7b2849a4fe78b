"""Readers of datasets: `load` of each module returns a `Source` or a `Dataset`.

A reader raises FileNotFoundError for files that are missing, with their layout and where to get
them; ValueError for an argument or files that do not suit, of which up to ten are named;
ModuleNotFoundError where it needs an extra package; and OSError where its cache cannot be written.
"""
