"""Data: where it comes from, who owns which part of it, and how it looks to a model.

Every source is a function that returns a `Dataset` of named domains: `scanners.load` (embedded) and
`digits.load` (FedBN's benchmark). `partition` makes clients of them.
"""
