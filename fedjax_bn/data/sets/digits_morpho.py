"""The digits benchmark with Morpho-MNIST as two unseen domains (FedBN, Appendix G and Table 17).

The folder is that of the digits benchmark, with Morpho-MNIST's folders in it:

    MNIST/  SVHN/  USPS/  SynthDigits/  MNIST-M/     as fedjax_bn/data/sets/digits.py says
    Morpho-MNIST/global/  Morpho-MNIST/local/        as fedjax_bn/data/sets/morpho_mnist.py says

Reference: Li et al., "FedBN", ICLR 2021, appendix G.
"""

from collections.abc import Sequence
from pathlib import Path

from fedjax_bn.data.domain import Dataset, Domain, Split, check_dataset
from fedjax_bn.data.sets import digits, morpho_mnist
from fedjax_bn.data.source import TEST, Pool

_UNSEEN = ("morpho_global", "morpho_local")
_SAME = ("mnist", "mnist_m")  # whose digits are Morpho-MNIST's


def load(
    path: str | Path,
    *,
    target: Sequence[str],
    seed: int = 0,
    fraction: float | None = None,
    truncate: bool | None = None,
) -> Dataset:
    """The digits benchmark and, behind it, morpho_global and morpho_local, which only test.

    Args:
      path: the folder.
      target: the unseen domains; both of Morpho-MNIST's must be among them.
      seed, fraction, truncate: see `digits.load`.

    Returns:
      Dataset "digits_morpho". Of Morpho-MNIST it has the published test part, 10,000 images each,
      made of the digits of MNIST's published test part. MNIST and MNIST-M, which show these digits
      too, train on their published training parts alone, so that no digit both trains and tests.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is corrupt, or Morpho-MNIST is no target.
    """
    missing = [name for name in _UNSEEN if name not in target]
    if missing:
        raise ValueError(
            f"digits_morpho has only test samples of {' and '.join(missing)}: set "
            f"config.target={','.join(_UNSEEN)}"
        )
    known = digits.load(
        path, seed=seed, fraction=fraction, truncate=truncate, whole=target, published=_SAME
    )
    unseen = morpho_mnist.load(Path(path) / "Morpho-MNIST").pools
    domains = (*known.domains, *map(_test_part, unseen))
    return check_dataset(known._replace(name="digits_morpho", domains=domains))


def _test_part(pool: Pool) -> Domain:
    chosen = pool.parts == TEST
    return Domain(
        pool.name, None, None, Split(pool.images[chosen], pool.labels[chosen], pool.names[chosen])
    )
