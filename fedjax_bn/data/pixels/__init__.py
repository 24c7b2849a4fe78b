"""Decodes image files, caches their pixels, and augments and normalizes them for a model."""
