"""What training returns in Python: the method, its state, its scores, and how it predicts."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fedjax_bn.arguments.text import nearest
from fedjax_bn.federation import FederatedMethod, FederatedState
from fedjax_bn.serving import predictor
from fedjax_bn.sharing import Variables
from fedjax_bn.training import score_tables
from fedjax_bn.training.evaluation.evaluate import served_variables, variables_of_client
from fedjax_bn.training.population import PopulationState
from fedjax_bn.training.records import Record, have_trained


class Result(NamedTuple):
    """A trained federation. `print(result)` shows its table of accuracies.

    Of several seeds the table has mean (standard deviation), `accuracy` the mean, and all else is
    the first seed's.
    """

    method: FederatedMethod  # the method that was trained
    state: FederatedState | PopulationState  # after the selected round
    clients: tuple[str, ...]  # the clients' names, in the order of the state's rows
    summary: Record  # the record that the command line writes as `summary.json`
    history: list[Record]  # one record a round, as in `metrics.jsonl`: losses, weights, accuracies
    seeds: tuple["Result", ...] = ()  # the results of all seeds, if there are several

    @property
    def accuracy(self) -> Record:
        """Test accuracies of the selected round in percent, the mean over seeds; for masks Dice.

        {"internal": {client: percent, "mean": percent}, "unseen": {name: {adaptation: percent}}}.
        """
        return self._over_seeds(np.mean) if self.seeds else self.summary["accuracy"]

    @property
    def deviation(self) -> Record:
        """The standard deviation over seeds (N - 1) of each `accuracy`; NaN for one seed."""
        return self._over_seeds(partial(np.std, ddof=1))

    def _over_seeds(self, measure: Callable[[np.ndarray], np.floating]) -> Record:
        def measured(*values: Any) -> Any:
            if isinstance(values[0], dict):
                return {key: measured(*(value[key] for value in values)) for key in values[0]}
            return float(measure(np.array(values, float)))  # None, of no finite score, is NaN

        return measured(*(result.summary["accuracy"] for result in self.seeds or (self,)))

    def variables(self, client: str | None = None) -> Variables:
        """Returns the model of a client, by default the one that an unseen client receives.

        A client that has never trained has that too. Where clients adapt to samples before they are
        tested, it is the model before that: before `adaptation.precise_statistics` and
        `methods.perfedavg.personalize`. An unknown client is a ValueError.
        """
        if client is None:
            return served_variables(self.state)
        if client not in self.clients:
            raise ValueError(f"client {client!r} is unknown{nearest(client, self.clients)}")
        records = self.history[: int(self.state.round)]
        trained = have_trained(records, list(self.clients)) if records else None
        return variables_of_client(self.state, self.clients.index(client), trained)

    def predict(
        self, images: np.ndarray, client: str | None = None, adaptation: str | None = None
    ) -> np.ndarray:
        """Returns probabilities f[N, C] of stored images [N, ...]; f[N, H, W, C] of their pixels.

        Args:
          images: in the form that training took; the method's preprocessing is applied.
          client: whose model predicts; None for the model that an unseen client receives.
          adaptation: how it predicts, such as "tsmobn:momentum=0.5"; None: a client as in its test,
            an unseen client by "running".

        Raises:
          ValueError: the client or the adaptation is unknown, or the images do not fit the model.
        """
        if adaptation is None and client is None:
            adaptation = "running"
        return predictor(self.method, self.variables(client), adaptation)(images)

    def __str__(self) -> str:
        """Returns the table of accuracies, or of Dice, as the command line prints it."""
        summaries = [result.summary for result in self.seeds or (self,)]
        return score_tables.comparison([[{"method": "simulated"} | row for row in summaries]])
