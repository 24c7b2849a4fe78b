"""Evaluation: scores of clients, of unseen domains and of finished runs."""
