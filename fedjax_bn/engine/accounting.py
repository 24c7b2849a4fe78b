"""What privacy a run has spent, by a kept library's accountant (dp-accounting)."""

import math
from collections.abc import Sequence


def epsilon(noise: float, rounds: int, delta: float, cohort: Sequence[int] = ()) -> float:
    """The epsilon of (epsilon, delta) that a client has after some rounds, by dp-accounting.

    With all clients in every round it is that of T Gaussian mechanisms together, exactly, between
    runs with a client's update and with zeros in its place. With C of K clients drawn at random
    (without repetition, and nobody is told who) it is a bound between runs in which a client's data
    are replaced (Wang, Balle & Kasiviswanathan, AISTATS 2019, Theorem 27), by which an update may
    move the sum twice as far.

    Args:
      noise: z; 0 gives infinity.
      rounds: T, at least 0.
      delta: above 0 and below 1; well below one over the number of clients.
      cohort: (C, K); empty where all take part.

    Raises:
      ImportError: dp-accounting is not installed.
    """
    try:
        import dp_accounting as dp
    except ImportError as error:
        raise ImportError(
            "epsilon is computed by dp-accounting, which is not installed: pip install "
            "'fedjax_bn[privacy]'"
        ) from error
    if not noise or not rounds:
        return math.inf if rounds else 0.0
    if not cohort or cohort[0] == cohort[1]:
        return float(dp.get_epsilon_gaussian(noise / math.sqrt(rounds), delta))
    from dp_accounting.rdp import RdpAccountant

    drawn, population = cohort
    one = dp.SampledWithoutReplacementDpEvent(population, drawn, dp.GaussianDpEvent(noise / 2))
    accountant = RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    return float(accountant.compose(dp.SelfComposedDpEvent(one, rounds)).get_epsilon(delta))
