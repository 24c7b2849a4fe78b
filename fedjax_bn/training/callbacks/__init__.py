"""What happens between the rounds of a run; see `training.loop.train`."""
