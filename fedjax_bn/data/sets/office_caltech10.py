"""Office-Caltech10 (Gong et al. 2012): the ten classes that Office-31 and Caltech-256 share.

    amazon/back_pack/*.jpg  caltech/...  dslr/...  webcam/...      958, 1123, 157, 295 images

Office-31's own form, amazon/images/back_pack/*.jpg beside amazon/interest_points, serves too; its
other classes are left out. Classes may have Caltech-256's names (touring-bike, coffee-mug, ...).

FedBN (section 5.3, D.3 and the authors' code): domains in this order; images stretched to 256x256,
no normalization beyond u8/255 (so mean 0 and standard deviation 1 here); training images are
flipped and turned within 30 degrees. Four fifths of each domain train (125 of dslr); every client
is then cut to 62 training and 50 validation images, 0.5 and 0.4 of the smallest. The authors'
lists are Python pickles, which are not read here.

Differs from the authors' code: images with transparency keep their colours, where it makes them
grey.

References: Gong, Shi, Sha, Grauman, "Geodesic flow kernel for unsupervised domain adaptation",
CVPR 2012; Saenko et al., "Adapting visual category models to new domains", ECCV 2010; Griffin,
Holub, Perona, "Caltech-256 object category dataset", 2007; Li et al., "FedBN", ICLR 2021.
"""

from pathlib import Path

from fedjax_bn.data.sets.folders import load_folders
from fedjax_bn.data.sets.published import Published
from fedjax_bn.data.source import Source

CLASSES = {  # in the order of FedBN's code, with Caltech-256's names
    "back_pack": (),
    "bike": ("touring-bike",),
    "calculator": (),
    "headphones": ("headphone",),
    "keyboard": ("computer-keyboard",),
    "laptop_computer": ("laptop", "laptop-101"),
    "monitor": ("computer-monitor",),
    "mouse": ("computer-mouse",),
    "mug": ("coffee-mug",),
    "projector": ("video-projector",),
}
OFFICE_CALTECH10 = Published(
    name="office_caltech10",
    domains={
        "amazon": (),
        "caltech": ("caltech10", "caltech256", "caltech101"),
        "dslr": (),
        "webcam": (),
    },
    classes=CLASSES,
    counts={"amazon": 958, "caltech": 1123, "dslr": 157, "webcam": 295},
    where=(
        "it must hold amazon, caltech, dslr and webcam, each with the class folders "
        f"{', '.join(CLASSES)} of images (Office-Caltech10, linked from github.com/med-air/FedBN)"
    ),
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
)


def load(
    path: str | Path | None,
    *,
    image_size: int = 256,
    cache: str | Path | None = None,
    progress: bool = True,
) -> Source:
    """Office-Caltech10 as u8[N, image_size, image_size, 3], ten classes, four domains.

    Args:
      path: the folder described above.
      image_size: pixels a side; FedBN has 256.
      cache: folder for the decoded images, see `decode`.
      progress: show a bar while decoding.

    Returns:
      Source "office_caltech10", without official parts.

    Raises:
      FileNotFoundError: a domain's folder is missing.
      ValueError: a class has no images, or an image cannot be read.
      OSError: the cache cannot be written.
    """
    return load_folders(OFFICE_CALTECH10, path, image_size, cache=cache, progress=progress)
