"""gPerXAN (Le et al., CVPR 2024): batch norm that stays, instance norm that travels."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict

from fedjax_bn.arguments.ranges import AtLeast0, bounded
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Value, minimizing
from fedjax_bn.methods.learning import Options, learning, method_of
from fedjax_bn.models.classifier import classifier_path
from fedjax_bn.models.hooks import Hooked, register
from fedjax_bn.normalization.calls import Call, intercepting, require_batch_norm
from fedjax_bn.normalization.instance import instance_moments, positioned
from fedjax_bn.normalization.layer import is_spatial
from fedjax_bn.sharing import STATISTICS, SharingRule, Variables, all_but_batch_norm, complete, join
from fedjax_bn.state import Received

COLLECTION = "instance_norms"  # path of a batch norm -> {"scale", "bias" f[C], "scores" f[2]}
_EPSILON = 1e-5  # PyTorch's default for instance norm


@bounded
def gperxan(  # type: ignore[misc] # its own default
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    weight: AtLeast0 = 0.5,
    share: SharingRule = all_but_batch_norm,
    **options: Unpack[Options],
) -> FederatedMethod:
    r"""FedBN whose batch norms also normalize by instance, with a loss through the global head.

    $y = s_B BN(x) + s_I IN(x)$ with $(s_B, s_I) = \mathrm{softmax}(scores)$ for each layer

    $CE(h(z)) + weight \; CE(h_g(z))$ for features z, the own head h and the received head h_g

    h_g is frozen in a round. Both norms have a scale and a bias. Batch norms stay with the client
    (`share`); instance norms and scores, the collection `instance_norms`, travel. A layer without
    spatial axes is a plain batch norm. The reported loss is the first term.

    Weight and first scores (1) are those of the authors' code (lhkhiem28/gPerXAN). Differs from it:
    both scores come back from the server, where its clients continue with their own of batch norm.

    Args:
      model: images -> logits, with at least one batch norm and one dense layer that classifies.
      weight: weight of the loss through the received head, at least 0.
      share: the sharing rule of the model's own collections.
    """
    learned, federate_options = learning(model, classifier="gperxan", **options)

    def start(key: jax.Array, variables: Variables) -> Variables:
        # The variables last: a collection that they bring wins over a fresh one.
        return {COLLECTION: _norms(require_batch_norm("gperxan", variables)), **variables}

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images = learned.read(variables, batch, key)
        loss, out = learned.trained(variables, images, batch, key, wanted=["features"])
        # The received head stays as it is in a round, so no gradient of it is taken.
        head = complete(join(received.shared, received.personal))["params"]
        for name in classifier_path("gperxan", learned.model, variables):
            head = head[name]
        logits = out.features @ head["kernel"].astype(out.features.dtype)
        if "bias" in head:
            logits += head["bias"].astype(logits.dtype)
        return loss + weight * learned.loss(logits, batch), (loss, out.moved)

    step = minimizing(objective, optimizer, ("params", COLLECTION))
    return method_of(step, share=share, travels=COLLECTION, start=start, **federate_options)


def _norms(variables: Variables) -> Variables:
    """Returns the instance norms and scores before training, for every batch norm."""
    norms = {}
    for (*path, name), leaf in flatten_dict(variables[STATISTICS]).items():
        if name == "mean":
            ones, scores = jnp.ones_like(leaf), jnp.ones(2, leaf.dtype)
            norms["/".join(path)] = {"scale": ones, "bias": jnp.zeros_like(ones), "scores": scores}
    return norms


def _hook(tree: Variables, images: jax.Array, key: jax.Array | None) -> Hooked:
    """Adds instance norms to the batch norms named in the tree, see `models.hooks`."""

    def add(function: Any, call: Call, args: tuple, kwargs: dict) -> jax.Array:
        y, x = function(*args, **kwargs), args[0] if args else kwargs["x"]
        if not is_spatial(x):
            return y
        norm = tree["/".join(call.path)]
        mean, var = instance_moments(x)
        norm = jax.tree.map(lambda leaf: leaf.astype(mean.dtype), norm)
        # Scale and shift of the instance norm as one affine map of x.
        factor = norm["scale"] * jax.lax.rsqrt(var + _EPSILON)
        shift = norm["bias"] - mean * factor
        x = x.astype(mean.dtype)
        instance = x * positioned(factor, x) + positioned(shift, x)
        batch_share, instance_share = jax.nn.softmax(norm["scores"])
        return (batch_share * y.astype(x.dtype) + instance_share * instance).astype(y.dtype)

    def concerns(call: Call) -> bool:
        return call.normalize is not None and call.method == "__call__"

    return Hooked(images, contexts=(intercepting(add, concerns),))


register(COLLECTION, _hook)
