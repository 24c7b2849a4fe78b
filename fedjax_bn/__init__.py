"""Federated learning under feature shift: FedBN and its successors as pure functions.

`import fedjax_bn as fb` imports nothing else; `fb.methods.fedbn` imports what it needs (PEP 562).
`fb.simulate` trains and tests a federation on arrays, `fb.load_run` reads a finished run, and
`fb.cite` returns the BibTeX of methods and data sets.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_bn import (
        adaptation,
        aggregation,
        client,
        contrib,
        data,
        engine,
        federation,
        incremental_aggregation,
        local_step,
        methods,
        models,
        normalization,
        report,
        serving,
        sharing,
        simulation,
        state,
        task,
        tasks,
        training,
    )
    from fedjax_bn.references import cite
    from fedjax_bn.run.files.finished_run import load_run
    from fedjax_bn.simulation import simulate

__version__ = "0.2.0"

__all__ = [
    "adaptation", "aggregation", "cite", "client", "contrib", "data", "engine", "federation",
    "incremental_aggregation", "load_run", "local_step", "methods", "models", "normalization",
    "report", "serving", "sharing", "simulate", "simulation", "state", "task", "tasks", "training",
]  # fmt: skip

_FUNCTIONS = {"cite": "references", "load_run": "run.files.finished_run", "simulate": "simulation"}


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
