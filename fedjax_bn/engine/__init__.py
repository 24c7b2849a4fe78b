"""The engine: the parts of a round, which every layer above uses."""
