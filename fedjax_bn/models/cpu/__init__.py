"""Convolution and pooling for CPU, where XLA's own are slow inside loops."""
