"""Holds the cases of `gpu_compile.py`, the program that compiles one, and what reads its result."""
