"""Inference of FedIG-A: the zero-shot adapter (Eq. 7, Table 14), and a record of its alphas."""

from collections.abc import Callable
from typing import Any

import jax

from fedjax_bn.adaptation.adaptation import Adaptation, predict_each
from fedjax_bn.models.forward import forward
from fedjax_bn.normalization.adapter import COLLECTION, Adapter, adapted_statistics
from fedjax_bn.sharing import Variables, path_names


def zero_shot_adapter(model: Any) -> Adaptation:
    """Every batch norm mixes each sample's statistics into the global ones by a learned alpha.

    The variables need the collection `adapter`, which `methods.fedig(..., adapter=True)` trains.
    """

    def predict(
        variables: Variables, carry: tuple, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, tuple]:
        del valid  # no sample sees another
        statistics = adapted_statistics(_adapter_of(variables))
        return predict_each(model, statistics, variables, images), carry

    return Adaptation(lambda variables: (), predict)


def record_alphas(model: Any) -> Callable[[Variables, jax.Array], dict[str, jax.Array]]:
    """Returns `record(variables, images) -> {layer name: alpha f[B]}` (FedIG, Fig. 4a, 7 to 9).

    `jit` sorts the layers by name; `normalization.calls.in_forward_order` restores their order.
    """

    def record(variables: Variables, images: jax.Array) -> dict[str, jax.Array]:
        statistics = adapted_statistics(_adapter_of(variables))
        recorded = forward(
            model, variables, images, statistics=statistics, wanted=["recorded"]
        ).recorded
        leaves = jax.tree_util.tree_leaves_with_path(recorded)
        return {"/".join(path_names(path[:-1])): alpha for path, alpha in leaves}

    return record


def _adapter_of(variables: Variables) -> Adapter:
    """The adapter's parameters.

    Raises:
      ValueError: there are none.
    """
    if COLLECTION not in variables:
        raise ValueError(
            f"the variables have no collection {COLLECTION!r} but {', '.join(sorted(variables))}: "
            "train with fedig and adapter=True, or use another adaptation"
        )
    return variables[COLLECTION]
