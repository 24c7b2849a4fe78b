"""Files of a run: its workdir, checkpoints, and who owns them."""
