"""FedDG, ELCFS (Liu et al., CVPR 2021): episodes with frequencies of other clients' images."""

from contextlib import nullcontext
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import (
    Above0,
    AtLeast0,
    Channels,
    GradientOrder,
    Margin,
    SamplesOr0,
    bounded,
)
from fedjax_bn.client import Client, Load, LocalUpdate, load_first
from fedjax_bn.contrib.boundary import boundary_contrast
from fedjax_bn.contrib.parts import (
    changing_outputs,
    collecting,
    in_row,
    require_images,
    starting_with,
)
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, Value, differentiate, gradient_step
from fedjax_bn.methods.learning import Learning, OptionsButServer, learning, method_of
from fedjax_bn.models.cpu.convolution import differentiated_twice
from fedjax_bn.normalization.calls import network_name
from fedjax_bn.sharing import PyTree, Variables, join, trainable
from fedjax_bn.state import Received


@bounded
def feddg(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    spectra: SamplesOr0 = 0,
    half: Margin = 0,
    drawn: bool = False,
    order: GradientOrder = 2,
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
    which sends the amplitudes of all clients to every client. These are data, so the user must set
    their number; with half 0 they are the means of single images. `traffic` counts an upload as
    large as the bank of all K clients, although it contains only the client's own amplitudes. The
    reported loss is F(w; x). Until another client has sent amplitudes, x' = x.

    A task of segmentation adds `boundary` times the contrast of features on and around the borders
    of regions (`contrib.boundary`), over both passes, in the map that the last layer reads.

    Defaults but `order` are those of the authors' released code, whose loader exchanges only the
    means, as a whole (half 0 and l = 0). The paper draws l ~ U(0, 1) in a small window: `drawn` and
    `half`. The code is of first order (`order=1`, which costs less); the default is the paper's
    objective, a function of w alone, and what our numbers were measured with.

    Differs from the code: clients send only the window, of images as they are trained on; x' is not
    clipped to bytes; the edge of an image is not a border; a region that a sample lacks is left
    out, where theirs gives NaN; only x moves running statistics.

    Args:
      spectra: number of images whose amplitudes each client sends, from 1 to a batch.
      half: half side of the window, at least 0.
      drawn: whether to draw l ~ U(0, 1) for each sample; otherwise l = 0.
      order: 2 to differentiate the inner step too, 1 not to, as in the authors' code.
      inner_rate: learning rate of the inner step, at least 0; 0.001 as in the authors' code.
      clip: largest absolute entry of the inner gradient, above 0; 100 as in the authors' code.
      channels: C of the images that the model reads.
      boundary: weight of the contrast, at least 0, where 0 leaves it out; 0.1 as in their code.
      model, optimizer, **options: as in `fedavg`, without `server`.

    Raises:
      ValueError: `spectra` is not set, or the model has no such map for the contrast.
    """
    if not spectra:
        raise ValueError(
            "feddg sends amplitude spectra of every client's images to all other clients: set "
            "their number (feddg.spectra=8), or use another method, such as fedavg"
        )
    load, side = options.get("load"), 2 * half + 1
    learned, federate_options = learning(model, **options)
    objective = _episodic_objective(
        learned, half, inner_rate, clip, boundary, drawn=drawn, order=order
    )

    def no_amplitudes(variables: Variables, num_clients: int) -> PyTree:
        shape, dtype = (num_clients, spectra), parameter_dtype(variables)
        amplitudes = jnp.zeros((*shape, side, side, channels), dtype)
        return {"amplitudes": amplitudes, "known": jnp.zeros(shape, dtype)}

    method = method_of(
        gradient_step(differentiate(objective), optimizer),
        memory=lambda shared, personal: jnp.zeros((), bool),
        around=lambda client: _showing(client, learned, load, spectra, half),
        server=collecting("known"),
        **federate_options,
    )
    shown = (
        f"feddg sends the amplitudes of {side}x{side} frequencies of {spectra} images of each "
        "client to the server and to all other clients (feddg.spectra, feddg.half)"
    )
    return starting_with(method, no_amplitudes)._replace(notes=(shown,))


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
        raise ValueError(
            "feddg contrasts the map that the last layer reads, which "
            f"{network_name(learned.model)} does not name: use UNet, give the model taps, "
            "{path of the module: channels}, or set feddg.boundary=0"
        )

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
        descend = lambda w, g: w - inner_rate * jnp.clip(g, -clip, clip)  # noqa: E731
        inner = jax.tree.map(descend, params, gradients)
        outer, (_, other_maps) = loss_of(inner, restyled)
        value = loss + outer
        if taps:
            all_maps, mask = jnp.stack([*maps, *other_maps]), batch["label"]["mask"]
            contrast = boundary_contrast(
                all_maps, mask, batch["valid"], task.segments, nested=task.nested
            )
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
    """Returns the client that sends amplitudes of its first images when it first takes part.

    The message has them in the client's row among all clients' rows, with ones in the same places.
    """

    def run(received: Received, batches: Batch, key: jax.Array) -> LocalUpdate:
        batch = load_first(load, batches, stream(key, "sent amplitudes"))
        dtype = parameter_dtype(join(received.shared, received.personal))
        valid, bank = batch["valid"], received.server
        order = jnp.argsort(~valid, stable=True)[:count]  # the valid ones first, in their order
        images = learned.prepare(batch["image"], dtype)
        require_images("feddg", images, bank["amplitudes"].shape[-1])
        amplitudes = low_amplitudes(images[order], half)
        is_sent = valid[order] & ~received.memory.method
        rows = {
            "amplitudes": jnp.where(is_sent[:, None, None, None], amplitudes, 0),
            "known": is_sent,
        }

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

    They are |F x|, except at frequency 0, the real sum of the pixels, which keeps its sign: the
    values thus do not depend on the zero of the standardized images.
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
        raise ValueError(f"feddg.half={half} is too large for images {x.shape}: set it lower")
    spectrum = jnp.fft.fft2(x, axes=(1, 2))
    rows, columns = (_places(length, half) for length in x.shape[1:3])
    return spectrum, spectrum[:, rows[:, None], columns]


def _places(length: int, half: int) -> jax.Array:
    return jnp.arange(-half, half + 1, dtype=jnp.int32) % length


def _signed(low: jax.Array, half: int) -> jax.Array:
    return jnp.abs(low).at[:, half, half].set(low[:, half, half].real)
