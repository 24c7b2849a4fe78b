"""The networks of the papers, in linen with our `BatchNorm`, and a user's own.

Detectors map images f[B, H, W, C] to the outputs of their levels, f[B, h, w, A, 5 + classes]. Each
other one maps images f[B, H, W, C] to logits f[B, num_classes] and has the methods
`features(images) -> f[B, F]` and `classify(features) -> f[B, num_classes]`. With `norm="group"` or
`norm="none"` networks have no running statistics (`layers.Network`). Methods take any linen module,
and by `from_nnx` any nnx module.
"""

from typing import TYPE_CHECKING, Any

from fedjax_bn.models.features import with_classifier as with_classifier
from fedjax_bn.models.networks import (
    MLP,
    AlexNet,
    DenseNet,
    DenseNet121,
    DigitCNN,
    ResNet,
    ResNet10,
    ResNet18,
    ResNet50,
    SmallCNN,
    SmallDigitCNN,
    TwoLayer,
)
from fedjax_bn.models.yolo import TinyDetector, YOLOv5, YOLOv5n, YOLOv5s

if TYPE_CHECKING:
    from fedjax_bn.models.nnx_model import from_nnx as from_nnx

__all__ = [
    "MLP",
    "AlexNet",
    "DenseNet",
    "DenseNet121",
    "DigitCNN",
    "ResNet",
    "ResNet10",
    "ResNet18",
    "ResNet50",
    "SmallCNN",
    "SmallDigitCNN",
    "TinyDetector",
    "TwoLayer",
    "YOLOv5",
    "YOLOv5n",
    "YOLOv5s",
]


def __getattr__(name: str) -> Any:
    """`from_nnx`; nnx is imported for those who use it."""
    if name == "from_nnx":
        from fedjax_bn.models.nnx_model import from_nnx

        return from_nnx
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
