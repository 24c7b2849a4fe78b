"""Gives internal clients precise statistics before they are tested, see `adaptation.precise`."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedjax_bn.adaptation.precise import Pooled, no_samples, pool
from fedjax_bn.data.domain import Split
from fedjax_bn.engine.devices import BATCH, CLIENTS, apart, padded
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.images import Prepare
from fedjax_bn.federation import FederatedState
from fedjax_bn.normalization import StatisticsRule
from fedjax_bn.sharing import OWN, STATISTICS, batch_norm_paths, join, with_frozen
from fedjax_bn.training.evaluation import scoring
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.mesh import clients_of
from fedjax_bn.training.programs import made_once

Reestimate = Callable[[FederatedState, Sequence[int]], FederatedState]
_BLOCK = 16  # batches on a device at a time, if they are not kept there


def reestimation(experiment: Experiment, splits: Sequence[Split], size: int = 0) -> Reestimate:
    """Returns `reestimate(state, places)`: the state in which each row has precise statistics.

    Row by row they are of the samples of `splits` at `places`. A block has `size` rows; 0 for all
    splits at once, whose batches stay on the device if they fit. A model without batch norm is
    returned as it is.
    """
    mesh, rule = experiment.mesh, experiment.method.statistics
    parts = experiment.model, experiment.prepare, rule, mesh
    pooled = made_once(("pool", *parts), lambda: _pooling(*parts))
    # Batches of one class would mislead the layers behind a batch norm.
    splits = [scoring.in_order(split, 0) for split in splits]
    batch = min(experiment.evaluation.batch_size, max(len(split.images) for split in splits))
    rows = size or padded(len(splits), mesh)
    if not size:
        limit = experiment.plan.device_megabytes
        resident = scoring.SplitBatches(splits, batch, mesh).kept_within(limit)

    def reestimate(state: FederatedState, places: Sequence[int]) -> FederatedState:
        if not batch_norm_paths(join(state.shared, state.personal)):
            return state
        if not size:
            return pooled(state, resident(), rows)
        batches = scoring.SplitBatches([splits[k] for k in places], batch, mesh, rows=size)
        return pooled(state, batches.blocks(_BLOCK), rows)

    return reestimate


def _pooling(
    model: Any, prepare: Prepare, rule: StatisticsRule | None, mesh: Mesh | None
) -> Callable[[FederatedState, Iterable[Any], int], FederatedState]:
    """Returns `pooled(state, blocks, rows)`, the state with the statistics of all blocks."""
    # Devices that share out a batch in training have the same rows, and each has a part of the
    # batches of a block.
    beside = 1 if mesh is None else mesh.shape.get(BATCH, 1)

    def on_device(common: tuple, rows: tuple, data: Any) -> Pooled:
        (shared, frozen), (personal, moments) = common, rows
        if beside > 1:
            first = jax.lax.axis_index(BATCH) * len(data.images)
            data = data._replace(batch=data.batch + first)
            data = jax.tree.map(lambda x: jax.lax.all_gather(x, BATCH, tiled=True), data)

        def add(moments: Pooled, place: tuple[jax.Array, jax.Array]) -> tuple[Pooled, None]:
            client, batch = place
            row = client % len(moments.samples)
            own, before = jax.tree.map(lambda leaf: leaf[row], (personal, moments))
            variables = with_frozen(join(shared, own), frozen)
            images = prepare(data.images[batch], parameter_dtype(variables))
            valid = data.valid[batch] & (client >= 0)
            after = pool(model, variables, before, images, valid, statistics=rule)
            return jax.tree.map(lambda rows, x: rows.at[row].set(x), moments, after), None

        return jax.lax.scan(add, moments, (data.client, data.batch))[0]

    @partial(jax.jit, static_argnums=1, out_shardings=clients_of(mesh))
    def start(state: FederatedState, rows: int) -> Pooled:
        personal = jax.tree.map(lambda leaf: leaf[0], state.personal)
        nothing = no_samples(join(state.shared, personal))
        return jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape), leaf.dtype), nothing)

    @partial(jax.jit, out_shardings=clients_of(mesh))
    def add_block(state: FederatedState, moments: Pooled, data: Any) -> Pooled:
        common, rows = (state.shared, state.frozen), (state.personal, moments)
        after = apart(on_device, mesh, common, rows, data)
        if beside == 1:
            return after
        # Every device returned its rows, and those beside each other the same ones.
        grouped = (mesh.shape[CLIENTS], beside, -1)
        return jax.tree.map(
            lambda leaf, x: leaf.reshape(*grouped, *x.shape[1:])[:, 0].reshape(x.shape),
            after,
            moments,
        )

    def pooled(state: FederatedState, blocks: Iterable[Any], rows: int) -> FederatedState:
        moments = start(state, rows)
        for block in blocks:
            moments = add_block(state, moments, block)
        statistics = moments.statistics
        nothing = jax.tree.map(lambda leaf: None, state.shared[STATISTICS])
        personal = {**state.personal, STATISTICS: statistics}
        if OWN in personal:  # the model that predicts in the place of the shared one
            model = {**personal[OWN]["model"], STATISTICS: statistics}
            personal[OWN] = {**personal[OWN], "model": model}
        return state._replace(shared={**state.shared, STATISTICS: nothing}, personal=personal)

    return pooled
