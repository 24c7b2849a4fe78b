"""A trained model in use: stored images in, probabilities of classes out.

    predict = predictor(method, global_variables(state), adapt="tsmobn")
    probabilities = predict(images)          # u8[N, H, W, C], as trained on -> f[N, classes]

or, without any training code, from a folder that `fedjax-bn serve` wrote: `load(folder, "tsmobn")`.
"""

from fedjax_bn.serving.folder import load
from fedjax_bn.serving.predictor import Predictor, predictor

__all__ = ["Predictor", "load", "predictor"]
