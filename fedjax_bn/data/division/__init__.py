"""Makes the clients of a federation: splits, partitions and sizes."""
