"""A user's own load, perturbation and task, in every place that has a seam for them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as fed
from fedjax_bn.federation import global_variables
from fedjax_bn.methods import fedavg, fedbn, fedig, moon
from fedjax_bn.task import Score, Task

SIZES = (7, 4)
SGD = optax.sgd(0.1)


def pointing(batches):
    """The same samples as numbers of a source [K, N, ...], in another order."""
    image, valid = np.asarray(batches["image"]), np.asarray(batches["valid"])
    rows, (steps, size) = len(image), valid.shape[1:]
    order = np.random.default_rng(0).permutation(steps * size)
    source = np.nan_to_num(image.reshape(rows, steps * size, -1))[:, order]
    numbers = np.argsort(order).reshape(steps, size)
    index = np.where(valid, numbers, 10**6)  # padding points anywhere
    return batches | {"image": jnp.asarray(index, jnp.int32), "source": jnp.asarray(source)}


def test_numbers_of_samples_in_a_source_train_as_the_samples_do(x64):
    batches, variables = fed.batches_of(SIZES), fed.in_float64(fed.variables_of(fed.OneNorm()))
    method = fed.once(fedbn, fed.OneNorm(), SGD)
    plain, _ = fed.run_rounds(method, variables, batches, rounds=2)
    pointed, _ = fed.run_rounds(method, variables, pointing(batches), rounds=2)
    fed.assert_close(pointed, plain, rtol=1e-12, atol=1e-13)


def test_a_load_may_move_labels_and_drop_samples(x64):
    """A rotation of the classes, told by the source, and every second sample left out."""
    batches, variables = fed.batches_of(SIZES), fed.in_float64(fed.variables_of(fed.PlainNet()))

    def load(source, batch, key):
        del key
        label = (batch["label"] + source["turn"]) % fed.CLASSES
        even = jnp.arange(len(batch["valid"])) % 2 == 0
        return batch | {"label": label, "valid": batch["valid"] & even}

    turn = jnp.asarray([1, 2], jnp.int32)
    ours, told = fed.run_rounds(
        fedavg(fed.PlainNet(), SGD, load=load), variables, batches | {"source": {"turn": turn}}
    )
    even = np.arange(4) % 2 == 0
    by_hand = batches | {
        "label": (batches["label"] + turn[:, None, None]) % fed.CLASSES,
        "valid": batches["valid"] & even,
        "size": batches["valid"].sum((1, 2), dtype=jnp.int32),
    }
    theirs, metrics = fed.run_rounds(fed.once(fedavg, fed.PlainNet(), SGD), variables, by_hand)
    fed.assert_close(ours, theirs, rtol=1e-12)
    np.testing.assert_allclose(told["loss"], metrics["loss"], rtol=1e-12)


def test_a_perturbation_acts_on_what_the_model_reads_and_in_training_only(x64):
    """Bytes are standardized before it: adding d to x is adding d/2 * 255 to the bytes."""
    batches, variables = fed.batches_of(SIZES), fed.in_float64(fed.variables_of(fed.PlainNet()))
    stored = np.random.default_rng(1).integers(0, 200, batches["image"].shape, dtype=np.uint8)
    moved = fedavg(fed.PlainNet(), SGD, perturb=lambda key, x, valid: x + 2 * 51 / 255)
    ours, _ = fed.run_rounds(moved, variables, batches | {"image": jnp.asarray(stored)})
    brighter = batches | {"image": jnp.asarray(stored + 51)}
    plain, _ = fed.run_rounds(fed.once(fedavg, fed.PlainNet(), SGD), variables, brighter)
    fed.assert_close(ours, plain, rtol=1e-10, atol=1e-12)


class TwoHeads(nn.Module):
    """A number and a class of each sample."""

    @nn.compact
    def __call__(self, x):
        value = nn.Dense(1, name="value")(x)[:, 0]
        return {"value": value, "logits": nn.Dense(fed.CLASSES, name="c")(x)}


def squared(outputs, label, valid):
    """Half the mean squared error of the value, plus the cross entropy of the class."""
    entropy = optax.softmax_cross_entropy_with_integer_labels(outputs["logits"], label["class"])
    loss = jnp.square(outputs["value"] - label["value"]) / 2 + entropy
    return jnp.where(valid, loss, 0).sum() / jnp.maximum(valid.sum(dtype=loss.dtype), 1)


error = Score("error", lambda outputs, label, valid: outputs["value"], lambda kept: kept.mean())
OWN = Task(squared, error)


def zeros():
    like = jax.eval_shape(TwoHeads().init, fed.KEY, jnp.zeros((2, fed.FEATURES), jnp.float32))
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), like)


def two_labels(batches):
    value = np.asarray(batches["label"]) / 2.0
    label = {"class": batches["label"], "value": jnp.asarray(value, jnp.result_type(float))}
    return batches | {"label": label}


def test_a_users_own_task_with_a_tree_of_labels_is_trained(x64):
    """One step of one client from zero weights, in NumPy."""
    batches = two_labels(fed.batches_of((4,)))
    state, metrics = fed.run_rounds(fedavg(TwoHeads(), SGD, task=OWN), zeros(), batches)
    x, y = np.asarray(batches["image"])[0, 0], np.asarray(batches["label"]["class"])[0, 0]
    params = global_variables(state)["params"]
    step = 0.1 * (x * (y / 2)[:, None]).mean(0)
    np.testing.assert_allclose(params["value"]["kernel"][:, 0], step, rtol=1e-12)
    expected = np.log(fed.CLASSES) + ((y / 2) ** 2).mean() / 2
    np.testing.assert_allclose(metrics["loss"], [expected], rtol=1e-12)


@pytest.mark.parametrize("make", [fedig, moon])
def test_methods_that_read_a_classifier_refuse_other_tasks(make):
    with pytest.raises(ValueError, match=r"error"):
        make(fed.OneNorm(), SGD, task=OWN)
