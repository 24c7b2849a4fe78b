"""Predicts class probabilities of stored images, or of their pixels, with a trained model.

    predict = predictor(method, global_variables(state), adapt="tsmobn")
    probabilities = predict(images)          # u8[N, H, W, C], as trained on -> f[N, classes]

A model that segments gives f[N, H, W, classes], the background first.

`load(folder, "tsmobn")` makes the predictor from a folder that `fedjax-bn serve` wrote, without
training code.
"""

from fedjax_bn.serving.folder import load
from fedjax_bn.serving.predictor import Predictor, predictor

__all__ = ["Predictor", "load", "predictor"]
