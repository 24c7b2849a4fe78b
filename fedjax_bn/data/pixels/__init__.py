"""Pixels: image files decoded and kept, changed at random in training, and as a model sees them."""
