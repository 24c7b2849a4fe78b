"""Logistic regression on the features of a network that nobody trains on PACS.

    python launch/frozen_features.py --maps MAPS.npz --resnet50 FILE

MAPS.npz is made by launch/convert/frozen_maps.py, FILE by launch/convert/keras_resnet.py with
--classes 7. For each domain a classifier is fitted to all images of the other three and tested on
all of its own; "L2" is the weight of half its squared norm beside the sum of the losses, 1/C of
scikit-learn. "running" has the features of ImageNet's running statistics; in "batch" the batch
norms of the last block have the tested domain's statistics, of batches of 125, which TsmoBN nears.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.linear_model import LogisticRegression

from fedjax_bn.data.sets.npz import load_npz
from fedjax_bn.models import ResNet50
from fedjax_bn.models.forward import forward
from fedjax_bn.models.pretrained import load_pretrained
from fedjax_bn.normalization import batch_statistics, running_statistics
from fedjax_bn.sharing import Variables

L2 = (1, 30, 300, 3000)
BATCH = 125


def main() -> None:
    """Prints a line for each domain and strength of regularization."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--maps", required=True, help="the archive of frozen_maps.py")
    parser.add_argument("--resnet50", required=True, help="the file of keras_resnet.py")
    options = parser.parse_args()
    source = load_npz(options.maps)
    network = ResNet50(len(source.classes), keras=True, after="layer4_1")
    forms = jax.eval_shape(network.init, jax.random.key(0), jnp.asarray(source.pools[0].images[:1]))
    variables, _ = load_pretrained(options.resnet50, network, forms)

    @jax.jit
    def features(variables: Variables, maps: jax.Array) -> list[jax.Array]:
        return [
            forward(network, variables, maps, statistics=rule, wanted=["features"]).features
            for rule in (running_statistics, batch_statistics)
        ]

    running, batch, labels = {}, {}, {}
    for pool in source.pools:
        labels[pool.name] = pool.labels
        order = np.random.default_rng(0).permutation(len(pool.labels))
        # The last batch is filled with the first images, so that all have one shape.
        blocks = np.resize(order, (-(-len(order) // BATCH), BATCH))
        results = [features(variables, pool.images[block]) for block in blocks]
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
