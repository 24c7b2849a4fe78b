"""Who owns which samples: splits, partitions, sizes, the clients of a federation."""
