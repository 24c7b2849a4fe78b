"""Frozen leaves: one copy, which nothing trains, sends, averages or remembers."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import federations as fed
from fedjax_bn import sharing
from fedjax_bn.federation import client_variables, global_variables, traffic
from fedjax_bn.local_step import differentiate
from fedjax_bn.methods import fedavg
from fedjax_bn.methods.perfedavg import personalize
from fedjax_bn.models import hooks
from fedjax_bn.normalization import BatchNorm
from fedjax_bn.state import Received
from method_table import METHODS

OFTEN = ("fedbn",)
MORE = {"perfedavg, second order": {"second_order": True}}
NAMES = (*METHODS, *MORE)
MOMENTUM = optax.sgd(0.1, momentum=0.5)


class Body(nn.Module):
    """A dense layer whose gradient is zeroed by hand."""

    zeroed: bool

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(), (x.shape[-1], 2), x.dtype)
        return x @ (jax.lax.stop_gradient(kernel) if self.zeroed else kernel)


class Net(nn.Module):
    """`MapNet` after a body, which is to be frozen."""

    zeroed: bool = False
    norm: bool = True

    @nn.compact
    def __call__(self, x, train=False):
        x = Body(self.zeroed, name="body")(x.reshape(len(x), -1, 2))
        x = nn.relu(BatchNorm(name="norm")(x) if self.norm else x).mean(1)
        x = nn.Dropout(0.2)(x, deterministic=not train)
        return nn.Dense(fed.CLASSES, name="out")(x)


@jax.jit
def predicting(state):
    """The models with which an unseen client and all others predict."""
    clients = jax.vmap(hooks.predicting)(client_variables(state))
    return hooks.predicting(global_variables(state)), clients


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in OFTEN)) for n in NAMES]
)
def test_frozen_leaves_keep_their_bits_and_the_others_are_trained_as_if_zeroed(x64, name):
    found = {}
    options = fed.ON_MAPS.get(name, {}) | fed.NAMED.get(name, {}) | MORE.get(name, {})
    for zeroed in (False, True):
        net = Net(zeroed, name != "fedwon")
        more = {} if zeroed else {"frozen": sharing.at("body")}
        make = METHODS[name.partition(",")[0]]
        method = make(net, MOMENTUM, clients="map", **options, **more)
        start = fed.in_float64(fed.variables_of(Net(False, name != "fedwon")))
        state = fed.begun(method, jax.random.key(1), start, 2)
        for _ in range(2):
            state, metrics = method.round(state, fed.batches_of((8, 6)), jax.random.key(1))
        found[zeroed] = *predicting(state), metrics
        if not zeroed:
            (kept,) = jax.tree.leaves(state.frozen)
            np.testing.assert_array_equal(kept, start["params"]["body"]["kernel"])
            rest = state._replace(frozen=())
            assert not [p for p, _ in jax.tree.leaves_with_path(rest) if "body" in str(p)]
    fed.assert_close(*found.values(), 1e-9, 1e-12)


def test_a_round_moves_the_bytes_of_the_trained_leaves_alone():
    """The body is frozen, the affine parameters of batch norms train, the head is personal."""
    net, variables, batches = fed.NormNet(), fed.variables_of(fed.NormNet()), fed.batches_of((8, 6))
    frozen = sharing.all_but("a/scale", "a/bias", "b/scale", "b/bias", "c")
    method = fedavg(net, optax.adam(0.1), share=_but_head, frozen=frozen, keep_optimizer=True)
    states = [
        jax.eval_shape(lambda n=count: method.init(jax.random.key(0), variables, n))
        for count in (1, 2)
    ]
    one = jax.tree.map(lambda leaf: leaf[0], batches)
    affine, head = 4 * 8 * 4, (8 * fed.CLASSES + fed.CLASSES) * 4
    sent = traffic(method, states[0], one)
    # The number of the round, and an upload's size, risk, loss, client and two booleans.
    assert sent == {"down": affine + 4, "up": affine + 18}
    moments = 2 * (affine + head) + 4
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    assert (size(states[0].personal), size(states[0].memory)) == (head, moments)
    # One copy of the frozen leaves for any number of clients; a weight of the last round for each.
    assert size(states[1]) - size(states[0]) == head + moments + 4


def _but_head(variables):
    return jax.tree.map_with_path(lambda path, _: path[1].key != "c", variables)


@pytest.mark.parametrize("moves", [False, True])
def test_a_batch_norm_in_a_frozen_part_keeps_its_statistics_or_moves_them(moves):
    """Kept, they normalize in training too: a step is that of a network that predicts."""
    net, variables, batches = fed.NormNet(), fed.variables_of(fed.NormNet()), fed.batches_of((4,))
    frozen = sharing.all_but("c", statistics=not moves)
    method = fedavg(net, fed.SGD, frozen=frozen)
    state = fed.begun(method, jax.random.key(0), variables, 1)
    state, _ = method.round(state, batches, jax.random.key(0))
    after = jax.device_get(fed.global_variables(state))
    same = jax.tree.map(np.array_equal, after, jax.device_get(variables))
    assert all(jax.tree.leaves(same["batch_stats"])) != moves
    assert all(jax.tree.leaves({k: v for k, v in same["params"].items() if k != "c"}))

    def loss(head):
        given = {**variables, "params": {**variables["params"], "c": head}}
        logits = net.apply(given, batches["image"][0, 0])
        label = batches["label"][0, 0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    head = variables["params"]["c"]
    if not moves:
        step = jax.tree.map(lambda w, g: w - 0.1 * g, head, jax.jit(jax.grad(loss))(head))
        fed.assert_close(after["params"]["c"], step, 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("name", "rule", "message"),
    [
        ("fedavg", sharing.at("bodi"), "'bodi'"),
        ("fedavg", sharing.everything, "every parameter"),
        ("fedavg", sharing.nothing, "no leaf"),
        ("hbn", sharing.at("norm"), "running statistics"),
        ("copa", sharing.at("out"), "classifiers"),
    ],
)
def test_what_cannot_be_frozen_is_refused(name, rule, message):
    method, variables = METHODS[name](Net(), fed.SGD, frozen=rule), fed.variables_of(Net())
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: method.init(jax.random.key(0), variables, 2))


LABELS = jax.tree_util.tree_map_with_path(
    lambda path, _: "moves" if path[0].key == "c" else "stays",
    fed.variables_of(fed.NormNet())["params"],
)
BY_MODULE = {name: "moves" if name == "c" else "stays" for name in LABELS}
OF_TRAINED = LABELS | {"bn": {"kernel": "stays", "bias": None}, "a": {"scale": None, "bias": None}}


@pytest.mark.parametrize("labels", [{"params": LABELS}, BY_MODULE, OF_TRAINED, lambda _: BY_MODULE])
def test_labels_of_all_or_of_trained_parameters_are_taken(labels):
    parts = {"moves": optax.adam(0.1), "stays": optax.set_to_zero()}
    optimizer = optax.multi_transform(parts, labels)
    method = fedavg(
        fed.NormNet(), optimizer, frozen=sharing.at("bn/bias", "a"), keep_optimizer=True
    )
    variables, key = fed.variables_of(fed.NormNet()), jax.random.key(0)
    state = jax.eval_shape(lambda: method.init(key, variables, 2))
    moments = [leaf for leaf in jax.tree.leaves(state.memory) if leaf.ndim > 1]
    assert sorted(leaf.shape for leaf in moments) == [(2, 3), (2, 3), (2, 8, 3), (2, 8, 3)]
    after, _ = jax.eval_shape(method.round, state, fed.batches_of((8, 6)), key)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_an_own_objective_may_call_apply_and_gets_no_gradient_of_frozen_leaves():
    net, variables, batches = fed.NormNet(), fed.variables_of(fed.NormNet()), fed.batches_of((4,))
    batch = jax.tree.map(lambda leaf: leaf[0, 0], batches)
    frozen = sharing.at("bn", "a", statistics=False)

    def objective(variables, batch, received, key):
        logits, moved = net.apply(variables, batch["image"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), (losses.mean(), moved)

    rest, kept = sharing.split_frozen(variables, frozen(variables))
    given = {**rest, sharing.FROZEN: kept}
    gradient = differentiate(objective)
    found = jax.jit(lambda tree: gradient(tree, batch, Received((), ()), jax.random.key(0)))
    (slopes, (loss, _)), (expected, (whole, _)) = found(given), found(variables)
    np.testing.assert_allclose(loss, whole, rtol=1e-6)
    assert slopes["params"]["bn"] == {"kernel": None, "bias": None}
    fed.assert_close(slopes, sharing.trainable(expected, kept), 1e-5, 1e-6)


def test_personalizing_a_received_model_leaves_frozen_leaves_where_they_are():
    net, variables = fed.NormNet(), fed.variables_of(fed.NormNet())
    batch = jax.tree.map(lambda leaf: leaf[0, 0], fed.batches_of((4,)))
    given = batch["image"], batch["label"]
    _, frozen = sharing.split_frozen(variables, sharing.all_but("c")(variables))
    adapt = jax.jit(lambda tree: personalize(net, tree, *given, frozen=frozen))
    adapted = adapt(variables)
    same = jax.tree.map(np.array_equal, *jax.device_get((adapted, variables)))
    assert not any(same["params"].pop("c").values())
    assert all(jax.tree.leaves(same))
