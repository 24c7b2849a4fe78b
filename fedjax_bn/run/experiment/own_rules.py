"""What `share` and `weigh` mean where a configuration leaves them empty: the method's own rules."""

from fedjax_bn import methods

# Of methods that have others than FedAvg's.
_SHARES = {
    "fedbn": "all_but_batch_norm",
    "fedig": "all_but_batch_norm",
    "fediga": "all_but_batch_norm",
    "silobn": "all_but_statistics",
    "singleset": "nothing",
}
_WEIGHS = {"csac": "by_divergence", "fedcd": "risk_extrapolation", "harmofl": "uniform"}


def own_rules(method: str, private: bool = False) -> dict[str, str]:
    """{"share": rule, "weigh": rule} of a method of the library, by their names.

    Args:
      method: as the configuration has it; of a user's own nothing is known, and {} is returned.
      private: whether updates are clipped; then all clients count alike.
    """
    if method not in methods.__all__:
        return {}
    return {
        "share": _SHARES.get(method, "everything"),
        "weigh": "uniform" if private else _WEIGHS.get(method, "by_size"),
    }


def has_own_weighing(method: str) -> bool:
    """Whether a method weighs otherwise than FedAvg where nothing is said."""
    return method in _WEIGHS
