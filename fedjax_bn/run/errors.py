"""Errors that a user can correct: the command line prints their message without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Base of all errors whose message is for the user."""


class ConfigError(UserError, ValueError):
    """A configuration, or data it names, that cannot be run."""


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Turns what readers and options raise, and a missing package, into a ConfigError."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error


class WorkdirError(UserError):
    """A folder that this run must not write to."""


class CheckpointError(UserError):
    """A checkpoint that cannot be read."""


class NotFiniteError(UserError):
    """An update was not finite, and the configuration asks to stop then."""


class RiskError(UserError):
    """The weighing rule cannot use the clients' training losses."""


class InterruptedRun(UserError):
    """The user stopped the run; its state is saved."""
