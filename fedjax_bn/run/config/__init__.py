"""Configuration: the functions with which a config file starts and changes keys."""

from fedjax_bn.run.config.keys import base, check, choose, override

__all__ = ["base", "check", "choose", "override"]
