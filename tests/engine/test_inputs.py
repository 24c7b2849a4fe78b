"""Images, labels and keys: every way in takes the same ones and refuses others alike."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import federations as fed
from fedjax_bn.data.sampling import drawing
from fedjax_bn.data.source import Pool, Source, check_source
from fedjax_bn.engine.inputs import as_images, class_labels, known_labels
from fedjax_bn.federation import broadcast_of, own_of
from fedjax_bn.methods import fedbn
from fedjax_bn.serving.predictor import predictor
from fedjax_bn.task import classification

KEY = jax.random.key(1)
SIZES = (7, 4)
HALF = (0.5,)


def method():
    return fed.once(fedbn, fed.OneNorm(), optax.sgd(0.1))


def state():
    return fed.begun(method(), KEY, fed.variables_of(fed.OneNorm()), 2)


def host(batches=None):
    return jax.tree.map(np.asarray, batches or fed.batches_of(SIZES))


def of_round(batches):
    return method().round(state(), batches, KEY)


def of_client(batches):
    one = fed.client(batches, 0) | {"client": jnp.int32(0)}
    return method().client(broadcast_of(state()), jax.jit(own_of)(state(), 0), one, KEY)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_floats_of_any_width_are_read_as_they_are(dtype):
    batches = host()
    image = np.nan_to_num(batches["image"]).astype(jnp.float16).astype(np.float32)
    image = image.astype(dtype).astype(np.float32)
    ours = of_round(batches | {"image": image.astype(dtype)})
    fed.assert_equal(ours, of_round(batches | {"image": image}))
    kept = as_images(image.astype(dtype))
    assert kept.dtype == np.float32
    np.testing.assert_array_equal(kept, image)


def test_images_that_are_neither_bytes_nor_floats_are_refused():
    images, labels = np.ones((4, 3, 3, 3), "int16"), np.array([0, 1, 0, 1])
    pool = Pool("a", images, labels, labels.astype(str))
    for way in (
        lambda: drawing([(images, labels)]),
        lambda: check_source(Source("own", ("a", "b"), (pool,), HALF, HALF)),
        lambda: predictor(method(), fed.global_variables(state()))(images),
    ):
        with pytest.raises(ValueError, match="uint8"):
            way()


WRONG = {
    "below 0": lambda label: np.where(np.arange(4) == 1, -1, label),
    "counted from 1": lambda label: label + 1,
    "no whole number": lambda label: label + 0.5,
    "one-hot": lambda label: np.eye(fed.CLASSES)[label],
}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", WRONG)
def test_labels_that_are_no_classes_are_refused(kind, on_device):
    batches = host()
    wrong = WRONG[kind](batches["label"])
    if on_device:
        wrong = jax.block_until_ready(jnp.asarray(wrong))
    for way in (of_round, of_client):
        with pytest.raises(ValueError, match=r"batches\['label'\]"):
            way(batches | {"label": wrong})
    if kind != "counted from 1":  # `drawing` does not know the model
        flat = np.asarray(wrong).reshape(-1, *np.shape(wrong)[3:])
        first = (np.zeros((3, 6), np.float32), np.array([0, 1, fed.CLASSES - 1]))
        with pytest.raises(ValueError, match="client 1"):
            drawing([first, (np.zeros((len(flat), 6), np.float32), flat)])


def test_padding_may_hold_any_label():
    batches = host()
    label = np.where(batches["valid"], batches["label"], -7)
    fed.assert_equal(of_round(batches | {"label": label}), of_round(batches))


@pytest.mark.parametrize("label", [-1, fed.CLASSES, 2**31 - 1])
def test_inside_a_program_a_sample_without_a_class_is_an_invalid_sample(label):
    """No label trains another class, and none makes the loss NaN: bit for bit it is left out."""
    batches, where = host(), (0, 0, 1)
    changed, left_out = np.array(batches["label"]), np.array(batches["valid"])
    changed[where], left_out[where] = label, False
    program = jax.jit(method().round)
    ours = program(state(), batches | {"label": changed}, KEY)
    fed.assert_equal(ours, program(state(), batches | {"valid": left_out}, KEY))
    assert np.isfinite(ours[1]["loss"]).all()


def test_known_labels_are_whole_numbers_of_any_dtype():
    for dtype in ("int8", "uint8", "int32", "uint32", "float16", "float32"):
        values = np.array([0, 2, 3, 100]).astype(dtype)
        label, known = known_labels(jnp.asarray(values), 3)
        assert label.tolist() == [0, 2, 0, 0]
        assert known.tolist() == [True, True, False, False]
    _, known = known_labels(jnp.asarray([-1, 0.5, np.nan, np.inf, 1], jnp.float32), 3)
    assert known.tolist() == [False, False, False, False, True]
    assert known_labels(jnp.asarray([2**32 - 1], jnp.uint32), 3)[1].tolist() == [False]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_mean_over_more_samples_than_16_bits_count_is_that_of_float64(dtype):
    random = np.random.default_rng(0)
    label = random.integers(0, 3, 70_000).astype(np.int32)
    logits = jnp.asarray(random.normal(size=(len(label), 3)), dtype)
    loss = classification().loss(logits, label, np.ones(len(label), bool))
    x = np.asarray(logits, np.float64)
    expected = (np.log(np.exp(x).sum(1)) - x[np.arange(len(x)), label]).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_a_legacy_key_gives_the_same_bits_and_a_number_is_refused():
    batches = fed.batches_of(SIZES)
    ours = method().round(state(), batches, jax.random.PRNGKey(5))
    fed.assert_equal(ours, method().round(state(), batches, jax.random.key(5)))
    draw = drawing([(np.zeros((3, 6), np.float32), np.arange(3))], batch_size=2)
    fed.assert_equal(draw(jax.random.PRNGKey(5)), draw(jax.random.key(5)))
    for key in (5, jnp.zeros(3), jax.random.split(KEY, 2), None):
        with pytest.raises(ValueError, match=r"^key"):
            method().round(state(), batches, key)
        with pytest.raises(ValueError, match=r"^key"):
            draw(key)


def test_a_state_that_a_round_has_used_up_is_refused_with_the_remedy():
    used, batches = state(), fed.batches_of(SIZES)
    method().round(used, batches, KEY)
    with pytest.raises(ValueError, match="earlier round"):
        method().round(used, batches, KEY)


NUMBERS = st.one_of(arrays.integer_dtypes(), arrays.unsigned_integer_dtypes())
ANY = st.one_of(
    NUMBERS, arrays.floating_dtypes(), arrays.boolean_dtypes(), arrays.unicode_string_dtypes()
)


@given(st.data())
def test_labels_are_kept_exactly_or_refused(data):
    dtype = data.draw(ANY)
    labels = data.draw(arrays.arrays(dtype, st.integers(1, 4)))
    classes = data.draw(st.sampled_from([2, 10, 1000, None]))
    most = 2**31 if classes is None else classes
    # Python's own numbers, which neither wrap around nor round
    right = dtype.kind in "iuf" and all(
        one == one and abs(one) != float("inf") and one == int(one) and 0 <= one < most
        for one in labels.tolist()
    )
    if not right:
        with pytest.raises(ValueError, match=r"^the file "):
            class_labels(labels, "the file", classes)
        return
    found = class_labels(labels, "the file", classes)
    assert found.dtype == np.int32
    assert found.tolist() == [int(one) for one in labels.tolist()]


def test_one_hot_labels_are_not_to_be_made_flat():
    with pytest.raises(ValueError, match=r"of shape \[N\]: .*argmax"):
        class_labels(np.eye(4), "the file")
