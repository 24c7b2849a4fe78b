"""What happens between the rounds of a run, one callback a file; see `training.loop.train`."""
