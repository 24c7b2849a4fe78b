"""What the program needs to run: configurations, rounds, evaluation, files, report."""
