"""Why a row of a paper has no run: for the rows that this library cannot make."""

TO_COME = "a method still to come"
NO_FORMULA = "a rival whose formula is not to be had"

_RIVALS = {
    **dict.fromkeys(("RandAug", "Mixstyle", "SFA", "RandConv", "L2D", "JiGen", "RSC"), TO_COME),
    **dict.fromkeys(("SelfReg", "COPA", "FedDG", "CSAC", "CSD"), TO_COME),
    **dict.fromkeys(("FedDG-GA", "FedSAM", "FedADG", "HarmoFL", "FedSR", "FedCMI"), TO_COME),
    **dict.fromkeys(("FedL2R", "SNR"), TO_COME),
    **dict.fromkeys(("ARFL", "FedCSA"), NO_FORMULA),
}


def rivals(*names: str) -> dict[str, str]:
    """Label -> why there is none, for rows such as "JiGen" or "JiGen+TsmoBN"."""
    return {name: _RIVALS[name.partition("+")[0]] for name in names}
