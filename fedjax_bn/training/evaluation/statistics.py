"""Gives internal clients precise statistics before they are tested, see `adaptation.precise`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from fedjax_bn.adaptation.precise import Pooled, no_samples, pool
from fedjax_bn.data.domain import Split, select
from fedjax_bn.data.sampling import validation_batches
from fedjax_bn.engine.batches import Batches
from fedjax_bn.engine.devices import apart, padded
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.federation import FederatedState
from fedjax_bn.sharing import OWN, STATISTICS, batch_norm_paths, join, with_frozen
from fedjax_bn.training.evaluation.scoring import in_order
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.mesh import clients_of, place_rows
from fedjax_bn.training.programs import made_once


def reestimation(
    experiment: Experiment, splits: Sequence[Split], size: int = 0
) -> Callable[[FederatedState, Sequence[int]], FederatedState]:
    """Returns `reestimate(state, places)`: each row of the state has precise statistics.

    They are of the samples of `splits` at `places`. A state has `size` rows; 0 for all splits,
    which stay on the device if they fit. A model without batch norm is unaffected.
    """
    mesh, parts = experiment.mesh, (experiment.model, experiment.prepare, experiment.mesh)
    rule = experiment.method.statistics
    add_block = made_once(("pool", rule, *parts), lambda: _adding(rule, *parts))
    # Batches of one class would mislead the layers behind a batch norm. No label is read.
    numbers = [np.arange(len(split.images)) for split in splits]
    splits = [in_order(Split(s.images, n), 0) for s, n in zip(splits, numbers, strict=True)]
    longest, rows = max(map(len, numbers)), size or padded(len(splits), mesh)
    batch = min(experiment.evaluation.batch_size, longest)
    fitting = experiment.plan.device_megabytes * 2**20 // (splits[0].images[:1].nbytes * rows)
    step = batch * max(1, min(fitting, longest + batch - 1) // batch)  # a client's, of a block

    def blocks(chosen: Sequence[Split]) -> Iterator[Batches]:
        for i in range(0, longest, step):
            parts = [select(s, np.arange(i, min(i + step, len(s.images)))) for s in chosen]
            read = partial(validation_batches, parts, batch, longest=step)
            yield place_rows(read, rows, clients_of(mesh))

    resident = [] if size or step < longest else [*blocks(splits)]

    def reestimate(state: FederatedState, places: Sequence[int]) -> FederatedState:
        if not batch_norm_paths(join(state.shared, state.personal)):
            return state
        moments = None
        for block in resident or blocks([splits[k] for k in places]):
            moments = add_block(state, moments, block)
        nothing = jax.tree.map(lambda leaf: None, state.shared[STATISTICS])
        personal = {**state.personal, STATISTICS: moments.statistics}
        # The model that predicts in the place of the shared one.
        if "model" in personal.get(OWN, {}):
            model = {**personal[OWN]["model"], STATISTICS: moments.statistics}
            personal[OWN] = {**personal[OWN], "model": model}
        return state._replace(shared={**state.shared, STATISTICS: nothing}, personal=personal)

    return reestimate


def _adding(rule: Any, model: Any, prepare: Any, mesh: Any) -> Callable[..., Pooled]:
    """Returns `add_block(state, moments or None, block)`, the moments with those of a block."""

    def on_device(common: tuple, rows: tuple, _: None) -> Pooled:
        def of_client(row: tuple) -> Pooled:
            personal, moments, batches = row
            variables = with_frozen(join(common[0], personal), common[1])

            def add(moments: Pooled, batch: Batches) -> tuple[Pooled, None]:
                images = prepare(batch["image"], parameter_dtype(variables))
                arguments = variables, moments, images, batch["valid"]
                return pool(model, *arguments, statistics=rule), None

            return jax.lax.scan(add, moments or no_samples(variables), batches)[0]

        return jax.lax.map(of_client, rows)

    @jax.jit
    def add_block(state: FederatedState, moments: Pooled | None, block: Batches) -> Pooled:
        rows = state.personal, moments, block
        return apart(on_device, mesh, (state.shared, state.frozen), rows)

    return add_block
