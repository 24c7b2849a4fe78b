"""The programs of `peers.py`, each in an environment of its own; making and watching them.

A program reads the task's file and says "ready". For each line that it gets it makes one round and
answers with a line of JSON, the mean training loss of each client, so that all of them are timed
from outside in the same way.
"""
