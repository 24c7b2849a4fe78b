"""Why a row of a paper has no run: for the rows that this library cannot make."""

TO_COME = "a method still to come"
NO_FORMULA = "a rival whose formula is not to be had"
DETECTION = "detection still to come"

_RIVALS = {
    **dict.fromkeys(("SFA", "L2D", "JiGen", "SelfReg", "COPA", "FedDG", "CSAC", "CSD"), TO_COME),
    **dict.fromkeys(("FedADG", "HarmoFL", "SNR"), TO_COME),
    **dict.fromkeys(("ARFL", "FedCSA"), NO_FORMULA),
}


def rivals(*names: str) -> dict[str, str]:
    """Label -> why there is none, for rows such as "JiGen" or "JiGen+TsmoBN"."""
    return {name: _RIVALS[name.partition("+")[0]] for name in names}
