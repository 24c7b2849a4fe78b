"""What `share` and `weigh` mean where a configuration leaves them empty: the method's own rules."""

import inspect
import typing

from fedjax_bn import methods
from fedjax_bn.aggregation import by_size
from fedjax_bn.sharing import everything

_USUAL = {"share": everything, "weigh": by_size}


def own_rules(method: str, private: bool = False) -> dict[str, str]:
    """{"share": rule, "weigh": rule} of a method of the library, by their names.

    A rule is the default in the method's signature. Where that is None, the annotation names the
    function that makes the rule: `Annotated[WeighingRule | None, risk_extrapolation]`.

    Args:
      method: as the configuration has it; of a user's own nothing is known, and {} is returned.
      private: whether updates are clipped; then all clients count alike.
    """
    if method not in methods.__all__:
        return {}
    found = inspect.signature(getattr(methods, method)).parameters
    rules = {key: _rule(found[key]) if key in found else _USUAL[key] for key in _USUAL}
    named = {key: rule.__name__ for key, rule in rules.items()}
    return named | ({"weigh": "uniform"} if private else {})


def _rule(parameter: inspect.Parameter) -> typing.Any:
    return parameter.default or parameter.annotation.__metadata__[0]


def has_own_weighing(method: str) -> bool:
    """Whether a method of the library weighs otherwise than FedAvg by default."""
    return own_rules(method).get("weigh", by_size.__name__) != by_size.__name__
