"""Reads images with masks in published forms, as square images and labels."""
