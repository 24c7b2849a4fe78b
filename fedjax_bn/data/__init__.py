"""Data: where it comes from, who owns which part of it, and how it looks to a model.

A file NAME.py reads the dataset NAME, `load(path, ...) -> source.Source`; `clients.make_clients`
makes of it the clients of a federation and the unseen ones, a `domain.Dataset`. `batches` keeps
their samples on the device, `stream` on the host; `augment` changes them, `images` normalizes them.
"""
