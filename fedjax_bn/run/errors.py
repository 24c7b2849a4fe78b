"""Mistakes that a user can put right; the command line prints their one sentence, no traceback."""


class UserError(Exception):
    """Base of all errors whose message is for the user."""


class ConfigError(UserError, ValueError):
    """A configuration, or data it names, that cannot be run."""


class WorkdirError(UserError):
    """A folder that this run must not write to."""


class CheckpointError(UserError):
    """A checkpoint that cannot be read."""


class NotFiniteError(UserError):
    """A client's update was not finite and the configuration says to stop."""


class RiskError(UserError):
    """The clients' training losses are none that the weighing rule can use."""


class InterruptedRun(UserError):
    """The user stopped the run; its state is saved."""
