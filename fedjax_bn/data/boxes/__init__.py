"""Reads images with boxes in published formats, as square images and labels."""
