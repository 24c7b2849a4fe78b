"""Scores of clients, internal and unseen."""
