"""The cases of `accelerator.py`, and the programs that time one each in a process of its own."""
