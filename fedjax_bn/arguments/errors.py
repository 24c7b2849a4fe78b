"""Errors that a user can correct: the command line prints their message without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Base of all errors whose message is for the user."""


class ConfigError(UserError, ValueError):
    """The configuration, or the data that it names, cannot be used."""


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Raises a ValueError, OSError or ImportError from the block as a ConfigError."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error


class WorkdirError(UserError):
    """A workdir cannot be used: it is damaged, not writable, or belongs to another run."""


class CheckpointError(UserError):
    """A checkpoint is missing or cannot be read."""


class NotFiniteError(UserError):
    """A client's update or the server's step is not finite, and the run stops."""


class RiskError(UserError):
    """The weighing rule cannot use the clients' training losses."""


class InterruptedRun(UserError):
    """The user stopped the run; its state is saved."""
