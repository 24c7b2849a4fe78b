"""Why a row of a paper has no run: for the rows that this library cannot make."""

NO_FORMULA = "a rival whose formula is not to be had"

_RIVALS = dict.fromkeys(("ARFL", "FedCSA"), NO_FORMULA)


def rivals(*names: str) -> dict[str, str]:
    """Label -> why there is none."""
    return {name: _RIVALS[name] for name in names}
