"""Maps headings of the papers' tables to the names of domains here."""

from pathlib import Path

from plan import STAND_INS

from fedjax_bn.data.sets.cifar10_c import INTERNAL, TYPES
from fedjax_bn.data.sets.files import names_in_npz

_CORRUPTIONS = (
    *("gaussian", "shot", "impulse", "defocus", "glass", "motion", "zoom", "snow", "frost", "fog"),
    *("bright", "contrast", "elastic", "pixelate", "jpeg"),
)
# data set here -> heading of a paper's tables -> domain here
DOMAINS: dict[str, dict[str, str]] = {
    "digits": {
        **{"SVHN": "svhn", "USPS": "usps", "SynthDigits": "synth_digits", "MNIST-M": "mnist_m"},
        "MNIST": "mnist",
    },
    "digits_morpho": {"Morpho-global": "morpho_global", "Morpho-local": "morpho_local"},
    "digits_dg": {"SVHN": "svhn", "MNIST-M": "mnist_m", "MNIST": "mnist", "SYN": "syn"},
    "office_caltech10": {"A": "amazon", "C": "caltech", "D": "dslr", "W": "webcam"},
    "domainnet": {
        **{"C": "clipart", "I": "infograph", "P": "painting", "Q": "quickdraw", "R": "real"},
        "S": "sketch",
    },
    "abide": {"NYU": "NYU", "USM": "USM", "UM": "UM_1", "UCLA": "UCLA_1"},
    "pacs": {"P": "photo", "A": "art_painting", "C": "cartoon", "S": "sketch"},
    "vlcs": {"V": "VOC2007", "L": "LabelMe", "C": "Caltech101", "S": "SUN09"},
    "officehome": {"A": "Art", "C": "Clipart", "P": "Product", "R": "Real World"},
    "camelyon17": {"hospital4": "center1", "hospital5": "center2"},
    "cifar10_c": dict(zip(_CORRUPTIONS, INTERNAL, strict=True)),
    "driving": {"Cityscapes": "cityscapes", "Mapillary": "vistas", "BDD100K": "bdd100k"},
    "bdd100k": {
        name: name for name in ("ClearHighway", "RainyHighway", "CityStreet", "Residential")
    },
}
TYPE_OF = {corruption: kind for kind, own in TYPES.items() for corruption in own}


def target_in(path: str, target: str) -> str:
    """Returns the domain to leave out: `target`, or its stand-in if the data have that one.

    Args:
      path: the digits' `.npz`.
      target: the domain that the plan leaves out.
    """
    other = STAND_INS.get(target)
    if not other or not Path(path).exists():
        return target
    try:
        domains = {name.partition("__")[0] for name in names_in_npz(Path(path))}
    except ValueError:  # the run itself reports the damaged file
        return target
    return other if target not in domains and other in domains else target
