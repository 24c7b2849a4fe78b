"""PN (Wang et al., CVPR 2025): population normalization, whose statistics are trained."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, differentiate, gradient_step
from fedjax_bn.methods.learning import Options, learning, method_of, supervised
from fedjax_bn.normalization import running_statistics
from fedjax_bn.normalization.calls import require_batch_norm
from fedjax_bn.sharing import STATISTICS, PyTree, Variables, path_names
from fedjax_bn.state import Received


@bounded
def pn(
    model: Any, optimizer: optax.GradientTransformation, **options: Unpack[Options]
) -> FederatedMethod:
    r"""FedAvg whose batch norms normalize by trained parameters m and v, not by a batch's moments.

    $y = s (x - m) / \sqrt{v + \epsilon} + b$ with the gradient with respect to m, v, s and b

    m and v are the model's running statistics: the optimizer moves them with the weights, the
    server averages them with the weights, and they normalize predictions. They start at the model's
    values, 0 and 1 in a new one. A sample does not depend on the others of its batch, so that
    batches of one image train.

    This follows the program of FL-MedSegBench (`models_dict/unet2d.py`). Differs from it: v is at
    least 0, where theirs may become negative. Both lack the paper's noise for large batches.

    Args:
      model, optimizer, **options: as in `fedavg`; the optimizer sees {"params", "batch_stats"}.
    """
    learned, federate_options = learning(model, **options)
    trained = ("params", STATISTICS)
    # The rule of predictions: its mean and variance are leaves of `batch_stats`.
    gradient = differentiate(supervised(learned, running_statistics), trained)
    step = gradient_step(gradient, optimizer, trained)

    def update(
        variables: Variables, state: PyTree, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[Variables, PyTree, jax.Array]:
        variables, state, loss = step.update(variables, state, batch, received, key)
        # A step may take a variance below 0, whose root is NaN.
        statistics = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jnp.maximum(leaf, 0) if path_names(path)[-1] == "var" else leaf,
            variables[STATISTICS],
        )
        return {**variables, STATISTICS: statistics}, state, loss

    return method_of(
        step._replace(update=update),
        start=lambda key, variables: require_batch_norm("pn", variables),
        **federate_options,
    )
