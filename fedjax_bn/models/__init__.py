"""The networks of the papers, in linen with our `BatchNorm`.

Each maps images f[B, H, W, C] to logits f[B, num_classes] and shows its two halves as methods,
`features(images) -> f[B, F]` and `classify(features) -> f[B, num_classes]`.
"""

from fedjax_bn.models.alexnet import AlexNet
from fedjax_bn.models.densenet import DenseNet, DenseNet121
from fedjax_bn.models.digit_cnn import DigitCNN
from fedjax_bn.models.mlp import MLP
from fedjax_bn.models.resnet import ResNet, ResNet10, ResNet18, ResNet50
from fedjax_bn.models.small_cnn import SmallCNN
from fedjax_bn.models.two_layer import TwoLayer

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
    "TwoLayer",
]
