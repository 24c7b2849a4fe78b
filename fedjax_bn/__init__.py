"""Federated learning under feature shift: FedBN and its successors as pure functions."""

__version__ = "0.1.0"
