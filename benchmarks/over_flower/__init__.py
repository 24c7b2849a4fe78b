"""What `benchmarks/flower.py` measures: one process, its parts, and federations over loopback."""
