"""The engine: what a round is made of, and what every layer above uses."""
