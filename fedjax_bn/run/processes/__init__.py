"""Processes: several as one run, meshes of devices, signals and the console."""
