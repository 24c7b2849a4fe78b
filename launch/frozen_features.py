"""Logistic regression on the features of a network that nobody trains on PACS.

    python launch/frozen_features.py --pacs PACS --resnet50 FILE [--size 96]

FILE is made by launch/convert/keras_resnet.py. For each domain a classifier is fitted to all images
of the other three and tested on all of its own; "L2" is the weight of half its squared norm beside
the sum of the losses, 1/C of scikit-learn. "running" has the features of the running statistics,
"batch" those of the tested domain with the statistics of batches of 125, which TsmoBN nears.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.linear_model import LogisticRegression

from fedjax_bn.data.sets.image_folders import load_image_folders
from fedjax_bn.engine.images import standardize
from fedjax_bn.models import ResNet50
from fedjax_bn.models.forward import forward
from fedjax_bn.models.pretrained import load_pretrained
from fedjax_bn.normalization import batch_statistics, running_statistics

L2 = (1, 30, 300)
BATCH = 125


def main() -> None:
    """Prints a line for each domain and strength of regularization."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pacs", required=True, help="the folder DOMAIN/CLASS/*.jpg")
    parser.add_argument("--resnet50", required=True, help="the file of keras_resnet.py")
    parser.add_argument("--size", type=int, default=96, help="side of the images in pixels")
    options = parser.parse_args()
    source = load_image_folders("pacs", options.pacs, image_size=options.size)
    network = ResNet50(len(source.classes), keras=True)
    prepare = standardize(source.mean, source.std)
    image = jnp.zeros((1, options.size, options.size, 3))
    variables = jax.jit(network.init)(jax.random.key(0), image)
    variables, _ = load_pretrained(options.resnet50, network, variables)

    @jax.jit
    def features(images: jax.Array) -> list[jax.Array]:
        x = prepare(images, jnp.float32)
        return [
            forward(network, variables, x, statistics=rule, wanted=["features"]).features
            for rule in (running_statistics, batch_statistics)
        ]

    running, batch, labels = {}, {}, {}
    for pool in source.pools:
        labels[pool.name] = pool.labels
        order = np.random.default_rng(0).permutation(len(pool.labels))
        # The last batch is filled with the first images, so that all have one shape.
        blocks = np.resize(order, (-(-len(order) // BATCH), BATCH))
        results = [features(pool.images[block]) for block in blocks]
        for part, arrays in zip((running, batch), zip(*results, strict=True), strict=True):
            part[pool.name] = np.concatenate(arrays)[: len(order)][np.argsort(order)]
    for target in labels:
        sources = [name for name in labels if name != target]
        x, y = (np.concatenate([part[name] for name in sources]) for part in (running, labels))
        for strength in L2:
            classifier = LogisticRegression(C=1 / strength, max_iter=150).fit(x, y)
            seen, tracked = (classifier.score(z[target], labels[target]) for z in (running, batch))
            print(f"{target} L2 {strength} running {100 * seen:.1f} batch {100 * tracked:.1f}")


if __name__ == "__main__":
    main()
