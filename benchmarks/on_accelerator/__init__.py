"""Holds the cases of `accelerator.py`, and the programs that each time one case in a process."""
