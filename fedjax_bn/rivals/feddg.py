"""FedDG, ELCFS (Liu et al., CVPR 2021): episodes in the frequencies of other clients' images."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.aggregation import (
    Aggregate,
    ServerState,
    ServerUpdate,
    averaging,
    cast_like,
    equal_messages,
)
from fedjax_bn.arguments.ranges import Above0, AtLeast0, Channels, Margin, SamplesOr0, bounded
from fedjax_bn.client import Client, Load, LocalUpdate, look_up
from fedjax_bn.engine.batches import blank_padding
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.keys import stream
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, differentiate, gradient_step
from fedjax_bn.methods.learning import Learning, OptionsButServer, learning, method_of
from fedjax_bn.models.cpu.choice import differentiated_twice
from fedjax_bn.models.forward import forward
from fedjax_bn.rivals.spectra import amplitudes, with_amplitudes
from fedjax_bn.sharing import Variables, join
from fedjax_bn.state import Received

PyTree = Any


@bounded
def feddg(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    spectra: SamplesOr0 = 0,
    half: Margin = 0,
    drawn: bool = False,
    inner_rate: AtLeast0 = 0.001,
    clip: Above0 = 100.0,
    channels: Channels = 3,
    **options: Unpack[OptionsButServer],
) -> FederatedMethod:
    """Clients minimize F(w; x) + F(w - inner_rate clip(grad F(w; x)); x'), through both (MAML).

        x' = `rivals.spectra.with_amplitudes`(x, A, l),   A of an image of another client

    **It shows parts of images.** When a client first takes part, it sends the amplitudes of the
    (2 half + 1)^2 lowest frequencies of each channel of its first `spectra` images to the server,
    which sends those of all clients to every client: data, though not the images. So how many
    there are has to be named. FedIG counts FedDG among the methods that harm privacy. With half 0
    they are the means of single images. An upload is counted (`traffic`) as large as the bank of
    all K clients; the client's own is all that is in it. The reported loss is F(w; x); a client
    that knows of no other one's images has x' = x.

    Defaults are those of the authors' released loader, in which only means are exchanged, whole
    (half 0 and l = 0), where the paper draws l ~ U(0, 1) in a small window: `drawn` and `half`.
    Differs from it: what is sent is the window alone, of images as they are trained on; x' is not
    clipped to bytes; the contrast of boundary pixels is for segmentation, and not here; running
    statistics move by x alone.

    Args:
      model: f[B, H, W, C] -> outputs.
      optimizer: the local optimizer.
      spectra: how many images each client shows all others, at least 1, and at most a batch.
      half: half side of the window, at least 0.
      drawn: whether l ~ U(0, 1) for each sample; else 0.
      inner_rate: of the inner step, at least 0; 0.001 as in the authors' code.
      clip: largest entry of the inner gradient, above 0; 100 as in the authors' code.
      channels: of the images that the model reads, C.
      **options: those of `fedavg` but `server`.

    Raises:
      ValueError: an argument is out of its range, or `spectra` is not named; at `round`, where
        samples are no such images.
    """
    if not spectra:
        raise ValueError(
            "feddg sends amplitude spectra of every client's images to all other clients: say of "
            "how many (feddg.spectra=8), or use a method that shows nothing of them, such as fedavg"
        )
    load = options.get("load")
    learned, rest = learning(model, **options)
    objective = episodic(learned, half, inner_rate, clip, drawn=drawn)
    method = method_of(
        gradient_step(differentiate(objective), optimizer),
        memory=lambda shared, personal: jnp.zeros((), bool),
        around=lambda client: _showing(client, learned, load or look_up, spectra, half),
        server=_collecting(),
        **rest,
    )

    def init(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        state = method.init(key, variables, num_clients)
        side, dtype = 2 * half + 1, parameter_dtype(variables)
        bank = {
            "amplitudes": jnp.zeros((num_clients, spectra, side, side, channels), dtype),
            "known": jnp.zeros((num_clients, spectra), dtype),
        }
        return state._replace(server=ServerState(sent=bank))

    side = 2 * half + 1
    shown = (
        f"feddg sends the amplitudes of {side}x{side} frequencies of {spectra} images of each "
        "client to the server and to all other clients (feddg.spectra, feddg.half)"
    )
    return method._replace(init=init, notes=(shown,))


def episodic(
    learned: Learning, half: int, inner_rate: float, clip: float, *, drawn: bool = False
) -> Objective:
    """The objective of `feddg`; `received.server` is the bank of all clients' amplitudes."""

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        images = learned.read(variables, batch, key)
        other = _in_other_styles(images, received, stream(key, "amplitudes"), half, drawn=drawn)

        def loss_of(params: PyTree, x: jax.Array) -> tuple[jax.Array, Variables]:
            own, options = {**variables, "params": params}, {"valid": batch["valid"], "key": key}
            out = forward(learned.model, own, x, train=True, **options)
            return learned.task.loss(out.outputs, batch["label"], batch["valid"]), out.moved

        params = variables["params"]
        with differentiated_twice():
            (loss, moved), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, images)
        inner = jax.tree.map(
            lambda w, g: w - inner_rate * jnp.clip(g, -clip, clip), params, gradients
        )
        return loss + loss_of(inner, other)[0], (loss, moved)

    return objective


def _in_other_styles(
    x: jax.Array, received: Received, key: jax.Array, half: int, *, drawn: bool
) -> jax.Array:
    """x' of a batch f[B, H, W, C], each by one of the other clients' images, all alike."""
    bank, choice_key, share_key = received.server, *jax.random.split(key)
    count = len(bank["known"])
    if bank["amplitudes"].shape[-1] != x.shape[-1]:
        raise ValueError(
            f"feddg exchanges frequencies of images with {bank['amplitudes'].shape[-1]} channels, "
            f"not {x.shape}: give it their number of channels (feddg.channels)"
        )
    others = jnp.arange(count, dtype=jnp.int32) != received.client
    allowed = ((bank["known"] > 0) & others[:, None]).reshape(-1)
    logits = jnp.where(allowed, 0.0, -jnp.inf)
    chosen = jax.random.categorical(
        choice_key, jnp.where(allowed.any(), logits, 0), shape=(len(x),)
    )
    found = bank["amplitudes"].reshape(-1, *bank["amplitudes"].shape[2:])[chosen]
    share = jnp.zeros((), x.dtype)
    if drawn:
        share = jax.random.uniform(share_key, (len(x), 1, 1, 1), x.dtype)
    return jnp.where(allowed.any(), with_amplitudes(x, found.astype(x.dtype), share, half), x)


def _showing(client: Client, learned: Learning, load: Load, count: int, half: int) -> Client:
    """The client, which sends amplitudes of its first images when it first takes part."""

    def run(received: Received, batches: Batch, key: jax.Array) -> LocalUpdate:
        steps = {name: leaf for name, leaf in batches.items() if name != "source"}
        first = jax.tree.map(lambda leaf: leaf[0], steps)  # labels may be a tree
        own_key = stream(key, "sent amplitudes")
        batch = blank_padding(load(batches.get("source"), first, own_key))
        dtype = parameter_dtype(join(received.shared, received.personal))
        valid = batch["valid"]
        order = jnp.argsort(~valid, stable=True)[:count]
        found = amplitudes(learned.prepare(batch["image"], dtype)[order], half)
        known = valid[order] & ~received.memory.method
        update = client.run(received, batches, key)
        message = _placed(received, jnp.where(known[:, None, None, None], found, 0), known)
        memory = update.memory._replace(method=received.memory.method | known.any())
        return update._replace(memory=memory, message=message)

    return client._replace(run=run)


def _placed(received: Received, found: jax.Array, known: jax.Array) -> PyTree:
    """What a client sends, in its place among all, and where that is; of zeros where it is sent."""
    bank = received.server

    def placed(like: jax.Array, own: jax.Array) -> jax.Array:
        return jnp.zeros_like(like).at[received.client, : len(own)].set(own.astype(like.dtype))

    return {"amplitudes": placed(bank["amplitudes"], found), "known": placed(bank["known"], known)}


def _collecting() -> ServerUpdate:
    """Averaging that keeps what clients have sent, and sends all of it to all."""
    plain = averaging()

    def update(
        shared: PyTree, aggregate: Aggregate, state: ServerState
    ) -> tuple[PyTree, ServerState]:
        mean, _ = plain.update(shared, aggregate, state)
        part = aggregate.message["known"]  # 1 / n for each of the n clients that count
        new = {}
        for name, old in state.sent.items():
            found = aggregate.message[name]
            sent = part.reshape(*part.shape, *(1,) * (old.ndim - 2)).astype(found.dtype)
            new[name] = jnp.where(sent > 0, found / jnp.where(sent > 0, sent, 1), old)
        return mean, ServerState(sent=cast_like(new, state.sent))

    return ServerUpdate(plain.init, update, message_weight=equal_messages)
