"""The two halves of any model: of one that shows them, and of one that does not.

A model shows its halves as methods `features` and `classify` (see `fedjax_bn.models.features`). Of
any other the classifier is the last `nn.Dense` that a pass calls, and the features are its input.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from fedjax_bn.models.features import takes_train

Halves = Callable[..., tuple[jax.Array, jax.Array]]


def halves(
    model: nn.Module, variables: dict[str, Any], images: jax.Array, *, frozen: bool = False
) -> Halves:
    """A function to be applied in place of `__call__` that returns (features, logits).

        method = halves(model, variables, images)
        features, logits = model.apply(variables, images, method=method)

    Args:
      model: linen module.
      variables: its collections; only shapes count.
      images: f[B, ...]; only the shape counts.
      frozen: whether the gradient of the logits stops at the features.

    Raises:
      ValueError: the model shows no halves and does not end in an `nn.Dense`.
    """
    stop = jax.lax.stop_gradient if frozen else lambda x: x
    if shows_halves(model):

        def shown(
            model: nn.Module, images: jax.Array, train: bool = False
        ) -> tuple[jax.Array, jax.Array]:
            features = model.features(images, **takes_train(model.features, train))
            options = takes_train(model.classify, train)
            return features, model.classify(stop(features), **options)

        return shown

    classifier = last_dense(model, variables, images)

    def found(
        model: nn.Module, images: jax.Array, train: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        seen = []

        def split(
            call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext
        ) -> Any:
            if not calls_dense(context) or context.module.path != classifier:
                return call(*args, **kwargs)
            seen.append(args[0])
            return call(stop(args[0]), *args[1:], **kwargs)

        with nn.intercept_methods(split):
            logits = model(images, **takes_train(model.__call__, train))
        return seen[-1], logits

    return found


class FeaturesOf(NamedTuple):
    """A model in the place of another one, whose output is the other's features.

    `adaptation.running(FeaturesOf(model))` predicts f[B, F] where that of the model predicts
    logits.
    """

    model: nn.Module

    def apply(self, variables: dict[str, Any], images: jax.Array, **options: Any) -> Any:
        """As `model.apply`."""
        method = halves(self.model, variables, images)
        out = self.model.apply(variables, images, method=method, **options)
        if not options.get("mutable"):
            return out[0]
        (features, _), moved = out
        return features, moved


def last_dense(model: nn.Module, variables: dict[str, Any], images: jax.Array) -> tuple[str, ...]:
    """The path of the last `nn.Dense` that a pass calls, whose output has the logits' shape.

    Raises:
      ValueError: there is none, or the model's output has another shape than its output.
    """
    called = []

    def note(
        call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext
    ) -> Any:
        output = call(*args, **kwargs)
        if calls_dense(context):
            called.append((context.module.path, output.shape))
        return output

    def plain(variables: dict[str, Any], images: jax.Array) -> jax.Array:
        return model.apply(variables, images, mutable=True)[0]

    with nn.intercept_methods(note):
        logits = jax.eval_shape(plain, variables, images)
    if not called or called[-1][1] != logits.shape:
        raise ValueError(
            f"the features before the classifier are needed, but {type(model).__name__} does not "
            "end in an nn.Dense: split its __call__ into methods features(images) -> f[B, F] and "
            "classify(features) -> f[B, classes], as the networks of fedjax_bn.models do"
        )
    return called[-1][0]


def shows_halves(model: nn.Module) -> bool:
    """Whether a model has the methods `features` and `classify`."""
    return hasattr(model, "features") and hasattr(model, "classify")


def calls_dense(context: nn.module.InterceptorContext) -> bool:
    """Whether what is intercepted is the call of an `nn.Dense`."""
    return isinstance(context.module, nn.Dense) and context.method_name == "__call__"
