"""Configuration: what a config file needs to begin with and to change keys."""

from fedjax_bn.run.config.keys import base, check, choose, override

__all__ = ["base", "check", "choose", "override"]
