"""Readers of datasets, each in the form in which its authors publish it."""
