"""How often a step of each method passes through the network by its formula: `method_costs`."""

from typing import Any, NamedTuple


class Passes(NamedTuple):
    """How often a step passes through the whole network, in units of its batch."""

    forward: float = 1
    maps: float = 1  # gradients of maps
    weights: float = 1  # gradients of weights

    @property
    def total(self) -> float:
        """All of them, which are taken to cost the same."""
        return sum(self)


_OF_THE_SERVER = ("fedadagrad", "fedadam", "fedavgm", "fedyogi")
_OF_THE_CLASSIFIER = ("copa", "csd", "fedsr", "jigen", "rsc", "selfreg", "sfa", "snr")
PASSES = {
    **dict.fromkeys(
        ("fedavg", "fedprox", "fedbn", "silobn", "singleset", "scaffold", "fednova", "feddc"),
        Passes(),
    ),
    **dict.fromkeys(_OF_THE_SERVER + _OF_THE_CLASSIFIER, Passes()),
    **dict.fromkeys(("fedwon", "fixbn", "mixstyle"), Passes()),  # other norms, as many passes
    "fedcd": Passes(),  # its second derivative is of the classifier alone
    "perfedavg": Passes(),  # a half of the batch adapts, the other half gives the gradient
    "csac": Passes(forward=2),  # by the frozen model too; its own layers come on top
    "fedadg": Passes(forward=2),  # for what the discriminator reads, once the network has moved
    "hbn": Passes(forward=2),  # a pass through the round's data before training
    "moon": Passes(forward=3),  # by the received and by the previous model too
    "fedsam": Passes(2, 2, 2),  # the gradient where the first one leads, too
    "harmofl": Passes(2, 2, 2),  # likewise
    "fedig": Passes(2, 2, 2),  # the mixed pass
    "fediga": Passes(3, 3, 2),  # the adapter's pass, with the weights frozen
    "l2d": Passes(4, 4, 2),  # two styles, for the model and again for the stylist
    "feddg": Passes(4, 4, 4),  # two gradients, and the derivative of the inner one
    "randconv": Passes(3, 3, 3),  # of three random convolutions
}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedig": {"cafl": "mean"},
    "fediga": {"cafl": "mean"},
    "feddg": {"spectra": 4},
}
FIELDS: dict[str, dict[str, Any]] = {"fedwon": {"norm": "none"}}  # of the network
