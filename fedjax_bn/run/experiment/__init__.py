"""Experiment: from a configuration to data, model and method, all checked."""
