"""The parts of `accelerator.py`: what is timed, in which process, and how it is written down."""
