"""Holds the cases of `tpu_compile.py`, the program that compiles one, and what reads its result."""
