"""Writes the maps of PACS after a block of ResNet-50 that nobody trains, for configs/pacs.py.

    python launch/convert/frozen_maps.py PACS RESNET50.safetensors MAPS.npz [--size 96]

PACS is laid out as in fedjax_bn/data/sets/image_folders.py; RESNET50.safetensors is made by
keras_resnet.py. MAPS.npz has the outputs of `layer4_1` by ImageNet's running statistics, f16[N, 3,
3, 2048] at 96 pixels (370 MB), in the form of fedjax_bn/data/sets/npz.py. A network that begins
there, ResNet50:keras=True:after=layer4_1, reads them.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_bn.data.sets.image_folders import load_image_folders
from fedjax_bn.engine.images import standardize
from fedjax_bn.models import ResNet50
from fedjax_bn.models.pretrained import load_pretrained
from fedjax_bn.sharing import Variables

BLOCK = "layer4_1"
BATCH = 125


def main() -> None:
    """Writes the archive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pacs", help="the folder DOMAIN/CLASS/*.jpg")
    parser.add_argument("resnet50", help="the file of keras_resnet.py")
    parser.add_argument("target", help="the .npz file to write")
    parser.add_argument("--size", type=int, default=96, help="side of the images in pixels")
    options = parser.parse_args()
    source = load_image_folders("pacs", options.pacs, image_size=options.size)
    network, prepare = (
        ResNet50(len(source.classes), keras=True),
        standardize(source.mean, source.std),
    )
    image = jnp.zeros((1, options.size, options.size, 3))
    forms = jax.eval_shape(network.init, jax.random.key(0), image)
    variables, _ = load_pretrained(options.resnet50, network, forms)

    @jax.jit
    def maps(variables: Variables, images: jax.Array) -> jax.Array:
        _, state = network.apply(
            variables,
            prepare(images, jnp.float32),
            capture_intermediates=lambda module, _: module.name == BLOCK,
            mutable=["intermediates"],
        )
        return state["intermediates"][BLOCK]["__call__"][0].astype(jnp.float16)

    arrays = {"classes": np.array(source.classes)}
    for pool in source.pools:
        count = len(pool.labels)
        # The last batch is filled with the first images, so that all have one shape.
        rows = np.resize(np.arange(count), (-(-count // BATCH), BATCH))
        computed = [maps(variables, pool.images[i]) for i in rows]
        arrays[f"{pool.name}__images"] = np.concatenate(computed)[:count]
        arrays[f"{pool.name}__labels"] = pool.labels
        print(pool.name, count, flush=True)
    np.savez(options.target, **arrays)


if __name__ == "__main__":
    main()
