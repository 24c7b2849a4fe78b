"""FedDG, ELCFS (Liu et al., CVPR 2021): episodes with frequencies of other clients' images."""

from contextlib import nullcontext
from typing import Annotated, Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import Above0, AtLeast0, Channels, SamplesOr0, between, bounded
from fedjax_bn.client import Client, Load, LocalUpdate, load_first
from fedjax_bn.contrib.parts import exchanging, in_row, require_images
from fedjax_bn.engine.dtypes import parameter_dtype, promote
from fedjax_bn.engine.inputs import UNLABELLED
from fedjax_bn.engine.keys import stream
from fedjax_bn.engine.segmentation import regions_of
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, Value, minimizing
from fedjax_bn.methods.learning import Learning, OptionsButServer, learning
from fedjax_bn.models.cpu import max_pool
from fedjax_bn.models.cpu.convolution import differentiated_twice
from fedjax_bn.normalization.calls import changing_outputs, network_name
from fedjax_bn.sharing import PyTree, Variables, join, trainable
from fedjax_bn.state import Received
from fedjax_bn.task import masked_mean

_TEMPERATURE = 0.05
_WIDTH = 5  # of the band around a region, in pixels
_NEVER = -1e30  # and not -inf, whose gradient would be NaN


@bounded
def feddg(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    spectra: SamplesOr0 = 0,
    half: Annotated[int, between(0, 2047)] = 0,
    drawn: bool = False,
    order: Annotated[int, between(1, 2)] = 2,
    inner_rate: AtLeast0 = 0.001,
    clip: Above0 = 100.0,
    channels: Channels = 3,
    boundary: AtLeast0 = 0.1,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    r"""Clients learn to adapt to images x' with the amplitudes A of other clients (MAML).

    $F(w; x) + F(w - \alpha \, \mathrm{clip}(\nabla F(w; x)); x')$, differentiated through both
    with `order=2`; with `order=1` the inner gradient counts as a constant

    $x' = F^{-1}((l |F x| + (1 - l) A) e^{i \angle F x})$ in a window of low frequencies

    **It reveals parts of images.** When a client first takes part, it sends the amplitudes of the
    (2 half + 1)^2 lowest frequencies of each channel of its first `spectra` images to the server,
    which sends those of all clients to every client. These are data, so the user must set their
    number; with half 0 they are the means of single images. `traffic` counts an upload as the bank
    of all K clients, although it has only the client's own. The reported loss is F(w; x). Until
    another client has sent amplitudes, x' = x.

    A task of segmentation adds `boundary` times the contrast of features on and around the borders
    of regions (`boundary_contrast`), over both passes, in the map that the last layer reads.

    Defaults but `order` are those of the authors' code, which exchanges only the means, as a whole
    (half 0 and l = 0), and is of first order (`order=1`, which costs less). The paper draws
    l ~ U(0, 1) in a small window: `drawn` and `half`. Differs from the code: clients send only the
    window, of images as they are trained on; x' is not clipped to bytes; the edge of an image is no
    border; a region that a sample lacks is left out, where theirs gives NaN; only x moves running
    statistics.

    Args:
      spectra: number of images whose amplitudes each client sends, from 1 to a batch; 0, the
        default, raises ValueError.
      half: half side of the window, at least 0.
      drawn: whether to draw l ~ U(0, 1) for each sample; otherwise l = 0.
      order: 2 to differentiate the inner step too, 1 not to.
      inner_rate: learning rate of the inner step, at least 0.
      clip: largest absolute entry of the inner gradient, above 0.
      channels: C of the images that the model reads.
      boundary: weight of the contrast, at least 0, where 0 leaves it out; otherwise a model without
        `taps` raises ValueError.
    """
    if not spectra:
        sends = "feddg sends amplitudes of every client's images to all others"
        raise ValueError(f"{sends}: set their number (feddg:spectra=8), or use another method")
    load, side = options.get("load"), 2 * half + 1
    learned, federate_options = learning(model, **options)
    objective = _episodic_objective(
        learned, half, inner_rate, clip, boundary, drawn=drawn, order=order
    )

    def no_amplitudes(variables: Variables, num_clients: int) -> PyTree:
        shape, dtype = (num_clients, spectra), parameter_dtype(variables)
        amplitudes = jnp.zeros((*shape, side, side, channels), dtype)
        return {"amplitudes": amplitudes, "known": jnp.zeros(shape, dtype)}

    method = exchanging(
        minimizing(objective, optimizer),
        "known",
        no_amplitudes,
        memory=lambda shared, personal: jnp.zeros((), bool),
        around=lambda client: _showing(client, learned, load, spectra, half),
        **federate_options,
    )
    shown = f"the amplitudes of {side}x{side} frequencies of {spectra} images (feddg:spectra, half)"
    return method._replace(notes=(f"feddg: each client sends the server and all others {shown}",))


def _episodic_objective(
    learned: Learning,
    half: int,
    inner_rate: float,
    clip: float,
    boundary: float,
    *,
    drawn: bool = False,
    order: int = 2,
) -> Objective:
    """Returns the objective of `feddg`; `received.server` is the bank of all amplitudes."""
    task = learned.task
    taps = tuple(getattr(learned.model, "taps", ())) if boundary and task.segments else ()
    if boundary and task.segments and len(taps) != 1:
        name, remedy = network_name(learned.model), "use UNet, or set feddg:boundary=0"
        raise ValueError(f"feddg contrasts the map in a model's taps, which {name} lacks: {remedy}")

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images = learned.read(variables, batch, key)
        restyled = _in_other_styles(images, received, stream(key, "amplitudes"), half, drawn=drawn)

        def loss_of(params: PyTree, x: jax.Array) -> tuple[jax.Array, tuple[Variables, list]]:
            maps: list[jax.Array] = []

            def note(name: str, output: jax.Array) -> jax.Array:
                maps.append(output)
                return output

            with changing_outputs(taps, note) if taps else nullcontext():
                loss, out = learned.trained({**variables, "params": params}, x, batch, key)
            return loss, (out.moved, maps)

        params = trainable(variables)["params"]
        # The CPU kernels use another form if their gradient is differentiated again.
        with differentiated_twice() if order == 2 else nullcontext():
            step = jax.value_and_grad(loss_of, has_aux=True)
            (loss, (moved, maps)), gradients = step(params, images)
        # First order: the outer loss sees the inner step as a constant shift.
        if order == 1:
            gradients = jax.lax.stop_gradient(gradients)

        def descend(w: jax.Array, g: jax.Array) -> jax.Array:
            return w - inner_rate * jnp.clip(g, -clip, clip)

        inner = jax.tree.map(descend, params, gradients)
        outer, (_, other_maps) = loss_of(inner, restyled)
        value = loss + outer
        if taps:
            mask, valid = batch["label"]["mask"], batch["valid"]
            all_maps = jnp.stack([*maps, *other_maps])
            contrast = boundary_contrast(all_maps, mask, valid, task.segments, nested=task.nested)
            value += boundary * contrast.astype(value.dtype)
        return value, (loss, moved)

    return objective


def _in_other_styles(
    x: jax.Array, received: Received, key: jax.Array, half: int, *, drawn: bool
) -> jax.Array:
    """Returns x' of a batch f[B, H, W, C], each by a random image of the other clients."""
    bank, choice_key, share_key = received.server, *jax.random.split(key)
    is_other_client = jnp.arange(len(bank["known"]), dtype=jnp.int32) != received.client
    allowed = ((bank["known"] > 0) & is_other_client[:, None]).reshape(-1)
    # Uniform over what others have sent; before they have, any choice, which is dropped below.
    logits = jnp.where(allowed, 0.0, -jnp.inf)
    logits = jnp.where(allowed.any(), logits, 0)
    chosen = jax.random.categorical(choice_key, logits, shape=(len(x),))
    styles = bank["amplitudes"].reshape(-1, *bank["amplitudes"].shape[2:])[chosen].astype(x.dtype)
    share = jnp.zeros((), x.dtype)
    if drawn:
        share = jax.random.uniform(share_key, (len(x), 1, 1, 1), x.dtype)
    return jnp.where(allowed.any(), with_amplitudes(x, styles, share, half), x)


def _showing(client: Client, learned: Learning, load: Load | None, count: int, half: int) -> Client:
    """Returns the client that sends amplitudes of its first images when it first takes part."""

    def run(received: Received, batches: Batch, key: jax.Array) -> LocalUpdate:
        batch = load_first(load, batches, stream(key, "sent amplitudes"))
        dtype = parameter_dtype(join(received.shared, received.personal))
        valid, bank = batch["valid"], received.server
        order = jnp.argsort(~valid, stable=True)[:count]  # the valid ones first, in their order
        images = learned.prepare(batch["image"], dtype)
        require_images("feddg", images, bank["amplitudes"].shape[-1])
        amplitudes = low_amplitudes(images[order], half)
        is_sent = valid[order] & ~received.memory.method
        sent_amplitudes = jnp.where(is_sent[:, None, None, None], amplitudes, 0)
        rows = {"amplitudes": sent_amplitudes, "known": is_sent}

        def placed(like: jax.Array, value: jax.Array) -> jax.Array:
            # A batch may have fewer images than are to be sent.
            full = jnp.zeros_like(like[0]).at[: len(value)].set(value.astype(like.dtype))
            return in_row(received.client, like, full)

        message = {name: placed(bank[name], value) for name, value in rows.items()}
        update = client.run(received, batches, key)
        memory = update.memory._replace(method=received.memory.method | is_sent.any())
        return update._replace(memory=memory, message=message)

    return client._replace(run=run)


def low_amplitudes(x: jax.Array, half: int) -> jax.Array:
    """Returns the amplitudes of the (2 b + 1)^2 lowest frequencies, f[B, 2 b + 1, 2 b + 1, C].

    They are |F x|, except at frequency 0, the real sum of the pixels, which keeps its sign.
    """
    return _signed(_spectrum(x, half)[1], half)


def with_amplitudes(x: jax.Array, style: jax.Array, share: jax.Array, half: int) -> jax.Array:
    """Returns F^-1((share |F x| + (1 - share) other) e^(i angle F x)) within the window.

    `style` holds amplitudes f[B, 2 b + 1, 2 b + 1, C]; the share is f[B, 1, 1, 1] or f[].
    """
    spectrum, low = _spectrum(x, half)
    amplitude, size = _signed(low, half), jnp.abs(low)
    length = jnp.where(size > 0, size, 1)
    # The phase as cosine and sine; frequency 0 is real, with its sign in the amplitude.
    cosine = jnp.where(size > 0, low.real / length, 1).at[:, half, half].set(1)
    sine = (low.imag / length).at[:, half, half].set(0)
    # Only the change is transformed back and added, so that x itself has no rounding by FFTs.
    change = (1 - share) * (style - amplitude)
    rows, columns = (_places(length, half) for length in x.shape[1:3])
    change = jax.lax.complex(change * cosine, change * sine)
    added = jnp.zeros_like(spectrum).at[:, rows[:, None], columns].set(change)
    return x + jnp.fft.ifft2(added, axes=(1, 2)).real


def _spectrum(x: jax.Array, half: int) -> tuple[jax.Array, jax.Array]:
    """Returns F x, and its window of low frequencies."""
    if min(x.shape[1:3]) < 2 * half + 1:
        raise ValueError(f"feddg:half={half} is too large for images {x.shape}: set it lower")
    spectrum = jnp.fft.fft2(x, axes=(1, 2))
    rows, columns = (_places(length, half) for length in x.shape[1:3])
    return spectrum, spectrum[:, rows[:, None], columns]


def _places(length: int, half: int) -> jax.Array:
    return jnp.arange(-half, half + 1, dtype=jnp.int32) % length


def _signed(low: jax.Array, half: int) -> jax.Array:
    return jnp.abs(low).at[:, half, half].set(low[:, half, half].real)


def boundary_contrast(
    maps: jax.Array, mask: jax.Array, valid: jax.Array, classes: int, *, nested: bool = False
) -> jax.Array:
    r"""Returns the contrast f[] of features on borders and around them, summed over regions.

    $-\log(e^{s_{ij} / T} / (e^{s_{ij} / T} + \sum_n e^{s_{in} / T}))$

    s is the cosine of two vectors, and T = 0.05. A vector is the mean of a map's features over the
    places of one sample and kind: on a region's border, or in the band of 5 pixels around it. i and
    j are different vectors of one kind, n are those of the other kind; the contrast of a region is
    the mean over all pairs (i, j), as in the authors' code (liuquande/FedDG-ELCFS). Kinds that a
    sample lacks, and samples that do not count, have no vector.

    `maps` f[M, B, H, W, F] are the features of M passes over the same B samples; the mask
    u8[B, H, W] has 255 for a pixel without a label; `classes` and `nested` as in `regions_of`.
    """
    dtype = promote(maps.dtype, jnp.float32)
    places = _bands(mask, classes, nested, dtype) * valid.astype(dtype)[:, None, None, None]
    count = places.sum((2, 3)).transpose(2, 0, 1)[:, :, None]  # f[regions, 2, 1, B]
    sums = jnp.einsum("kbhwr,mbhwf->rkmbf", places, maps.astype(dtype))
    has_pixels = jnp.broadcast_to(count > 0, sums.shape[:-1])
    vectors = jnp.where(has_pixels[..., None], sums / jnp.maximum(count, 1)[..., None], 0)
    shape = len(sums), 2, -1  # M B vectors of each kind
    losses = jax.vmap(_contrast)(vectors.reshape(*shape, sums.shape[-1]), has_pixels.reshape(shape))
    return losses.sum()


def _bands(mask: jax.Array, classes: int, nested: bool, dtype: jnp.dtype) -> jax.Array:
    """Returns f[2, B, H, W, regions], 1 on the border of a region, and 1 in the band around it."""
    inside = regions_of(mask, classes, nested=nested)
    outside = ~inside & (mask != UNLABELLED)[..., None]
    border, band = inside.astype(dtype), inside.astype(dtype)
    border *= _dilated(outside.astype(dtype))
    for _ in range(_WIDTH):
        band = _dilated(band)
    return jnp.stack([border, band * outside.astype(dtype)])


def _dilated(x: jax.Array) -> jax.Array:
    """Returns the maximum of each pixel and its four neighbours, f[B, H, W, C]."""
    down = max_pool(x, (3, 1), (1, 1), ((1, 1), (0, 0)))
    return jnp.maximum(down, max_pool(x, (1, 3), (1, 1), ((0, 0), (1, 1))))


def _contrast(vectors: jax.Array, has_pixels: jax.Array) -> jax.Array:
    """Returns the contrast f[] of vectors f[2, N, F] of two kinds, of which some are known."""
    # Bounded inside the root, so that the gradient is finite where a vector is 0.
    squares = jnp.square(vectors).sum(-1, keepdims=True)
    unit = vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))
    same = jnp.einsum("knf,kmf->knm", unit, unit) / _TEMPERATURE
    across = jnp.einsum("knf,kmf->knm", unit, unit[::-1]) / _TEMPERATURE
    across = jnp.where(has_pixels[::-1, None], across, _NEVER)
    # The logarithm above, as a function of the differences alone.
    losses = jax.nn.softplus(jax.nn.logsumexp(across, -1, keepdims=True) - same)
    pairs = has_pixels[:, None] & has_pixels[..., None] & ~jnp.eye(has_pixels.shape[-1], dtype=bool)
    return masked_mean(losses, pairs)
