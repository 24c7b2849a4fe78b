"""The networks of the papers, written in linen with our `BatchNorm`, and wrappers of other models.

A detector maps images f[B, H, W, C] to one output f[B, h, w, A, 5 + classes] per level, and a
network for segmentation to logits f[B, H, W, num_classes]. Every other network maps images
f[B, H, W, C] to logits f[B, num_classes] and has the methods `features(images) -> f[B, F]` and
`classify(features) -> f[B, num_classes]`. With `norm="group"` or `norm="none"` a network has no
running statistics (`layers.Network`). Methods also train any other linen module, and any nnx module
that `from_nnx` wraps; `to_nnx` gives it back with trained weights.
"""

from typing import TYPE_CHECKING, Any

from fedjax_bn.models.classifier import with_classifier as with_classifier
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
from fedjax_bn.models.unet import UNet
from fedjax_bn.models.vit import ConvNeXt, ConvNeXtT, DINOv2S14, ViT, ViTB16, ViTS16
from fedjax_bn.models.yolo import TinyDetector, YOLOv5, YOLOv5n, YOLOv5s

if TYPE_CHECKING:
    from fedjax_bn.models.nnx_model import from_nnx as from_nnx
    from fedjax_bn.models.nnx_model import to_nnx as to_nnx

__all__ = [
    "MLP", "AlexNet", "ConvNeXt", "ConvNeXtT", "DINOv2S14", "DenseNet", "DenseNet121", "DigitCNN",
    "ResNet", "ResNet10", "ResNet18", "ResNet50", "SmallCNN", "SmallDigitCNN", "TinyDetector",
    "TwoLayer", "UNet", "ViT", "ViTB16", "ViTS16", "YOLOv5", "YOLOv5n", "YOLOv5s",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports `from_nnx` or `to_nnx`, and with it nnx, when it is first used."""
    if name in ("from_nnx", "to_nnx"):
        from fedjax_bn.models import nnx_model

        return getattr(nnx_model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
