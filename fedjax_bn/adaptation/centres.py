"""T3A, which classifies by class centres of a client's features, and the entropy of logits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_bn.adaptation.adaptation import Adaptation, logits_and_seen
from fedjax_bn.arguments.ranges import Views, bounded
from fedjax_bn.engine.dtypes import promote
from fedjax_bn.models.classifier import classifier_path, require_linear
from fedjax_bn.models.forward import forward
from fedjax_bn.sharing import Variables


class _Supports(NamedTuple):
    """The carry of `t3a`: unit features f[C, M, F] and entropies f[C, M], 0 and inf if unused."""

    features: jax.Array
    entropy: jax.Array


@bounded
def t3a(model: Any, supports: Views = 20) -> Adaptation:
    """Classifies by class centres of the client's features (T3A, Iwasawa and Matsuo, NeurIPS 2021).

    A class is supported by the M features with the lowest entropy among its column of the
    classifier's kernel and the features that the classifier assigned to it. Its centre is the
    normalized sum of the normalized supports, its logit z . centre. Without a sample the centres
    are the normalized columns of the kernel, without bias. Running statistics; no gradient.

    Differs from the authors' code (matsuolab/T3A), where a column supports the class that the
    classifier assigns to it, with its bias: after training nearly always its own, and otherwise a
    class can be without support.

    Args:
      supports: M, from 1 to 1000; the carry takes M times the memory of the classifier's kernel.
    """

    def init(variables: Variables) -> _Supports:
        layer = variables["params"]
        for name in classifier_path("t3a", model, variables):
            layer = layer[name]
        # A column of the kernel is the first guess of where its class lies.
        rows = layer["kernel"].T.astype(promote(layer["kernel"].dtype, jnp.float32))
        logits = rows @ rows.T + layer.get("bias", jnp.zeros(len(rows))).astype(rows.dtype)
        # The classifier's own rows are the first supports of their classes.
        is_first = jnp.arange(supports) == 0
        features = jnp.where(is_first[:, None], _unit(rows)[:, None], 0)
        return _Supports(features, jnp.where(is_first, entropy(logits)[:, None], jnp.inf))

    def predict(
        variables: Variables, carry: _Supports, images: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, _Supports]:
        require_linear("t3a", model, variables, images)
        passed = forward(model, variables, images, wanted=["features"])
        features = passed.features.astype(carry.features.dtype)
        logits, seen = logits_and_seen(model, passed.outputs, valid)
        assigned = (logits.argmax(-1) == jnp.arange(len(carry.entropy))[:, None]) & seen
        entropies = jnp.where(assigned, entropy(logits).astype(carry.entropy.dtype), jnp.inf)
        # Unassigned samples have infinite entropy, so that all classes have arrays of one size.
        entropies = jnp.concatenate([carry.entropy, entropies], 1)
        # Numbers below M are stored supports, the others are samples of this batch.
        best = jnp.argsort(entropies, axis=1)[:, :supports]  # i[C, M]
        entropies = jnp.take_along_axis(entropies, best, 1)
        stored = jnp.take_along_axis(carry.features, jnp.minimum(best, supports - 1)[..., None], 1)
        of_batch = _unit(features)[jnp.maximum(best - supports, 0)]
        supports_after = jnp.where((best < supports)[..., None], stored, of_batch)
        # Unused places have infinite entropy and must add nothing to a class's sum.
        supports_after = jnp.where((entropies < jnp.inf)[..., None], supports_after, 0)
        outputs = features @ _unit(supports_after.sum(1)).T
        return outputs.astype(passed.outputs.dtype), _Supports(supports_after, entropies)

    return Adaptation(init, predict)


def entropy(logits: jax.Array) -> jax.Array:
    """Returns the entropy f[...] of softmax(logits f[..., C]), in [0, ln C]."""
    logs = jax.nn.log_softmax(logits)
    return -(jnp.exp(logs) * logs).sum(-1)


def _unit(x: jax.Array) -> jax.Array:
    """x f[..., F] over its norm; zeros stay zeros."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
