"""Holds the programs that `peers.py` compares, and the code that starts and watches them.

A program reads the task's file and prints "ready". For each line on its standard input it makes one
round and prints a line of JSON, the mean training loss of each client. So all programs are timed
from outside in the same way.
"""
