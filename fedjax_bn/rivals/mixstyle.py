"""MixStyle (Zhou et al., ICLR 2021): early feature maps in the style of another sample's."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from math import prod
from typing import Any, Unpack
from zlib import crc32

import jax
import jax.numpy as jnp
import optax

from fedjax_bn.arguments.ranges import Above0, UpTo1, bounded
from fedjax_bn.engine.keys import stream
from fedjax_bn.engine.perturb import partners
from fedjax_bn.federation import FederatedMethod
from fedjax_bn.local_step import Batch, Objective, differentiate, gradient_step
from fedjax_bn.methods.learning import Learning, Options, learning, method_of, supervised
from fedjax_bn.normalization import normalize_with, running_statistics
from fedjax_bn.normalization.calls import Call, intercepting, shapes_of, spatial_layers
from fedjax_bn.normalization.layer import is_spatial
from fedjax_bn.sharing import STATISTICS, Variables
from fedjax_bn.state import Received

Mix = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
_EPSILON = 1e-6  # of a variance, as in the authors' code
_STAGES = ("layer1", "layer2", "layer3")  # of a residual network


@bounded
def mixstyle(
    model: Any,
    optimizer: optax.GradientTransformation,
    *,
    names: str = "",
    probability: UpTo1 = 0.5,
    concentration: Above0 = 0.1,
    **options: Unpack[Options],
) -> FederatedMethod:
    """FedAvg whose clients, in training, mix the styles of feature maps within a batch.

        x' = std_mix (x - mean_i) / std_i + mean_mix
        mean_mix = l mean_i + (1 - l) mean_j,   likewise std_mix,   l ~ Beta(a, a)

    Mean and deviation are a sample's over the positions of each channel and pass no gradient; j is
    another valid sample of the batch, so that of the same client, and l one number a sample. Every
    named place mixes with a probability of its own. Nothing but the model travels. With
    probability 0 it is FedAvg.

    It is the paper's random mixing. Its other form, in which partners are of another domain, needs
    batches of several domains, and a client has one.

    Args:
      model: one whose named modules give maps f[B, H, W, C], or any with spatial axes.
      optimizer: the local optimizer.
      names: behind which modules, such as "norm1,norm2"; of "layer1" behind the last whose name is
        that or begins with "layer1_". "" for the ends of the stages layer1, layer2 and layer3, as
        the authors' scripts have on PACS ("layer1,layer2" on OfficeHome: KaiyangZhou/
        mixstyle-release, imcls/scripts/run_mixstyle.sh); where there are none, for the first two
        batch norms that see maps, our choice.
      probability: that a place mixes in a pass, in [0, 1]; 0.5 as in the paper.
      concentration: a, above 0; 0.1 as in the paper.
      **options: those of `fedavg`.

    Raises:
      ValueError: an argument is out of its range; at `round`, where no map has such a name.
    """
    learned, rest = learning(model, **options)
    mix = mixing_styles(probability, concentration)
    return method_of(gradient_step(differentiate(_mixed(learned, names, mix)), optimizer), **rest)


def _mixed(learned: Learning, names: str, mix: Mix) -> Objective:
    plain = supervised(learned)

    def objective(
        variables: Variables, batch: Batch, received: Received, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Variables]]:
        images = jax.eval_shape(lambda: learned.read(variables, batch, key))
        places = chosen_maps(learned.model, variables, images, names)
        with mixing_behind(places, mix, stream(key, "mixed styles"), batch["valid"]):
            return plain(variables, batch, received, key)

    return objective


def mixing_styles(probability: float, concentration: float) -> Mix:
    """Returns `mix(key, x f[B, ..., C], valid bool[B]) -> x'`, see `mixstyle`."""

    def mix(key: jax.Array, x: jax.Array, valid: jax.Array) -> jax.Array:
        other_key, weight_key, whether_key = jax.random.split(key, 3)
        shape = (len(x), *(1,) * (x.ndim - 1))
        weight = jax.random.beta(weight_key, concentration, concentration, shape, x.dtype)
        mixed = with_styles(x, x[partners(other_key, valid)], weight)
        return jnp.where(jax.random.bernoulli(whether_key, probability), mixed, x)

    return mix


def with_styles(x: jax.Array, other: jax.Array, weight: jax.Array) -> jax.Array:
    """x f[B, ..., C] with mean and deviation l times its own plus 1 - l times another's.

    Args:
      x: f[B, ..., C], with at least two positions.
      other: f[B, ..., C], whose style enters.
      weight: l f[B, 1, ..., 1], in [0, 1].
    """
    axes = tuple(range(1, x.ndim - 1))

    def style(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        var = x.var(axes, keepdims=True, ddof=1)
        return jax.lax.stop_gradient((x.mean(axes, keepdims=True), jnp.sqrt(var + _EPSILON)))

    (mean, std), (other_mean, other_std) = style(x), style(other)
    mixed_std = weight * std + (1 - weight) * other_std
    return mixed_std * (x - mean) / std + weight * mean + (1 - weight) * other_mean


def mixing_behind(
    places: tuple[str, ...], mix: Mix, key: jax.Array, valid: jax.Array
) -> AbstractContextManager:
    """A context in which the outputs of modules are mixed; it acts while they are traced.

    Args:
      places: paths of modules that give maps f[B, ..., C], as `chosen_maps` finds them.
      mix: `mix(key, x f[B, ..., C], valid) -> x'`, called with another key for each place.
      key: random key of the pass.
      valid: bool[B], the samples that count.
    """

    def mixed(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        output, name = function(*args, **kwargs), "/".join(call.path)
        if call.method != "__call__" or name not in places:
            return output
        return mix(jax.random.fold_in(key, crc32(name.encode())), output, valid)

    return intercepting(mixed)


def chosen_maps(model: Any, variables: Variables, images: Any, names: str = "") -> tuple[str, ...]:
    """The paths of the modules that `names` means, see `mixstyle`; nothing is computed.

    Raises:
      ValueError: no map has such a name, or there is none to choose.
    """
    found = _maps(model, variables, images)

    def last(name: str) -> str | None:
        alike = [path for path in found if path == name or path.startswith(f"{name}_")]
        return alike[-1] if alike else None

    if not names:
        stages = tuple(map(last, _STAGES))
        has_norms = STATISTICS in variables and None in stages
        layers = spatial_layers(model, variables, images) if has_norms else ()
        norms = tuple(layer for layer in layers if layer in found)[:2]
        wanted = norms or stages
    else:
        wanted = tuple(last(name.strip()) for name in names.split(","))
    places = tuple(place for place in wanted if place is not None)
    if len(places) < len(wanted):
        raise ValueError(
            f"mixstyle: names={names!r} finds no feature maps in {type(model).__name__}: name "
            f"modules that give maps, of {', '.join(found) or 'which it has none'}"
        )
    return places


def _maps(model: Any, variables: Variables, images: Any) -> list[str]:
    """The paths of modules, in the order of calls, whose outputs have a style: two positions."""
    found = []

    def note(function: Callable, call: Call, args: tuple, kwargs: dict) -> Any:
        output = function(*args, **kwargs)
        if call.method == "__call__" and call.path and hasattr(output, "shape"):
            styled = is_spatial(output) and prod(output.shape[1:-1]) > 1
            found.extend(["/".join(call.path)] * styled)
        return output

    with intercepting(note), normalize_with(running_statistics):
        shapes_of(model, variables, images)
    return found
