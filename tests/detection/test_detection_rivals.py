"""The rivals and detection: those that need no logits train boxes, the others refuse."""

import jax
import jax.numpy as jnp
import optax
import pytest

from detectors import Detector, detector_batches, detector_start
from fedjax_bn import methods
from fedjax_bn.detection import Recipe, detection

MODEL = Detector()
TASK = detection(MODEL.anchors, recipe=Recipe(scaled=False))


def make(name):
    return getattr(methods, name)(
        MODEL, optax.sgd(0.1), task=TASK, prepare=lambda images, dtype: images.astype(dtype)
    )


@pytest.mark.parametrize("name", ["fedsam", "harmofl", "mixstyle"])
def test_a_rival_that_needs_no_logits_takes_boxes(name):
    """Nothing is compiled here."""
    both = jax.tree.map(jnp.asarray, (detector_start(), detector_batches()))
    variables, batches = jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, both
    )
    method, key = make(name), jax.random.key(0)
    state = jax.eval_shape(lambda key, start: method.init(key, start, 2), key, variables)
    after, metrics = jax.eval_shape(method.round, state, batches, key)
    assert metrics["loss"].shape == (2,)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.parametrize("name", ["copa", "csd", "fedsr", "jigen", "randconv", "rsc", "selfreg"])
def test_a_rival_that_needs_logits_refuses_with_a_sentence(name):
    with pytest.raises(ValueError, match=f"{name} needs the logits .*'mAP50'.* fedbn"):
        make(name)
