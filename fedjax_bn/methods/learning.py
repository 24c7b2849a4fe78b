"""Parts of all methods: reading a batch, the loss of a task, and a method of one local step.

`learning` and `method_of` take their part of a method's options and pass the others on, so that a
method accepts the options of both and declares only its own.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedjax_bn.aggregation import ServerUpdate, Weighing, WeighingRule
from fedjax_bn.arguments.ranges import bounded
from fedjax_bn.client import Client, Finish, Load, LocalUpdate, Train, look_up, train_locally
from fedjax_bn.engine.batches import REQUIRED
from fedjax_bn.engine.dtypes import parameter_dtype
from fedjax_bn.engine.images import Prepare, standardize
from fedjax_bn.engine.imbalance import balanced, sums_by_class
from fedjax_bn.engine.keys import stream
from fedjax_bn.engine.perturb import Perturb
from fedjax_bn.engine.privacy import Privacy
from fedjax_bn.federation import FederatedMethod, federate
from fedjax_bn.local_step import Batch, LocalStep, Objective, Value
from fedjax_bn.models.forward import Output, forward
from fedjax_bn.normalization import StatisticsRule
from fedjax_bn.sharing import PyTree, SharingRule, Variables, complete, everything, join, keeping
from fedjax_bn.state import Received
from fedjax_bn.task import Task, classification, require_classifier


class OptionsButServer(TypedDict, total=False):
    """The options of `fedavg` without `server`, for methods with a server's step of their own."""

    prepare: Prepare | None
    perturb: Perturb | None
    task: Task | None
    local_epochs: int
    keep_optimizer: bool
    load: Load | None
    train: Train | None
    share: SharingRule
    frozen: SharingRule | None
    weigh: WeighingRule | Weighing | None
    privacy: Privacy | None
    clients: str
    mesh: Mesh | None
    statistics: StatisticsRule | None


class Options(OptionsButServer, total=False):
    """The options of `fedavg` and of most other methods."""

    server: ServerUpdate | None


class Learning(NamedTuple):
    """The model to train, what it reads, and its task.

    Attributes:
      model: images -> outputs, see `models.forward`.
      prepare: stored images -> what the model reads.
      perturb: changes what the model reads, in training only; or None.
      task: the loss and the score.
    """

    model: Any
    prepare: Prepare
    perturb: Perturb | None
    task: Task

    def read(self, variables: Variables, batch: Batch, key: jax.Array) -> jax.Array:
        """Returns the images of a batch as the model reads them in training, f[B, ...]."""
        images = self.prepare(batch["image"], parameter_dtype(variables))
        if self.perturb is None:
            return images
        # A separate stream, so that dropout draws the same with and without a perturbation.
        return self.perturb(stream(key, "perturb"), images, batch["valid"])

    def trained(
        self, variables: Variables, images: jax.Array, batch: Batch, key: jax.Array, **options: Any
    ) -> tuple[jax.Array, Output]:
        """Makes a training pass over images f[B, ...] as `read` returns them.

        `key` is that of dropout; options are `statistics` and `wanted` of `models.forward.forward`.
        Returns the task's loss f[] over the valid samples, and the `Output` of the pass.
        """
        valid = batch["valid"]
        out = forward(self.model, variables, images, train=True, valid=valid, key=key, **options)
        return self.loss(out.outputs, batch), out

    def loss(self, outputs: PyTree, batch: Batch) -> jax.Array:
        """Returns the task's loss f[] over the valid samples of a batch."""
        weights = {name: batch[name] for name in ("class_weights",) if name in batch}
        return self.task.loss(outputs, batch["label"], batch["valid"], **weights)

    def classes(self, load: Load, variables: Variables, batches: Batch) -> int | None:
        """Returns the number of classes; None without classes, or if outputs are not [B, classes].

        Only shapes of the variables and of one client's batches [S, B, ...] are read.
        """
        if not self.task.classifies:
            return None

        def outputs(variables: Variables, batches: Batch) -> PyTree:
            read = {name: batches[name] for name in REQUIRED}
            first_batch = jax.tree.map(lambda leaf: leaf[0], read)
            images = load(batches.get("source"), first_batch, jax.random.key(0))["image"]
            images = self.prepare(images, parameter_dtype(variables))
            return forward(self.model, variables, images).outputs

        # Only shapes: nothing is computed or compiled.
        logits = jax.eval_shape(outputs, variables, batches)
        return logits.shape[-1] if getattr(logits, "ndim", 0) == 2 else None


def learning(
    model: Any,
    *,
    prepare: Prepare | None = None,
    perturb: Perturb | None = None,
    task: Task | None = None,
    classifier: str = "",
    last_layer: str = "",
    **options: Any,
) -> tuple[Learning, dict[str, Any]]:
    """Returns the `Learning`, and the other options with `learned` for `method_of`.

    Args:
      model: images -> outputs.
      prepare: stored images -> what the model reads; by default bytes are standardized with mean
        and standard deviation 0.5.
      perturb: `perturb(key, x f[B, ...], valid bool[B]) -> x`, between `prepare` and the model, in
        training only; see `fedjax_bn.engine.perturb`.
      task: the loss to train by; `task.classification()` by default.
      classifier: the name of a method that needs the logits of a classifier, which raises
        ValueError for a task without; "" for other methods.
      last_layer: the same for one that also takes masks.
      **options: all other options, which are returned.
    """
    learned = Learning(model, prepare or standardize(), perturb, task or classification())
    if classifier or (last_layer and not learned.task.segments):
        require_classifier(classifier or last_layer, learned.task)
    return learned, {"learned": learned} | options


@bounded
def method_of(
    step: LocalStep,
    *,
    memory: Callable[[PyTree, PyTree], PyTree] | None = None,
    finish: Finish | None = None,
    around: Callable[[Client], Client] = lambda client: client,
    start: Callable[[jax.Array, Variables], Variables] | None = None,
    keeps: str = "",
    travels: str = "",
    learned: Learning | None = None,
    **options: Unpack[Options],
) -> FederatedMethod:
    """Returns the method whose clients make one kind of local step.

    Args:
      step, memory, finish: as in `client.train_locally`.
      around: makes the method's client from the usual one.
      start: `start(key, variables) -> variables`, which `init` calls first. It adds the method's
        collections, or raises ValueError for an unsuitable model.
      keeps, travels: a collection that stays with its client, and one that is shared, whatever
        `share` is; "" for none.
      learned, **options: what `learning` returns.
    """
    # Options in this signature belong to the client; the others are for `federate`.
    # Read from it, so that a new option of clients needs no second list.
    names = inspect.signature(train_locally).parameters
    federate_options: dict[str, Any] = {**options}
    local = {name: federate_options.pop(name) for name in names if name in federate_options}
    for collection, shared in ((keeps, False), (travels, True)):
        if collection:
            share = federate_options.get("share", everything)
            federate_options["share"] = keeping(share, collection, shared=shared)
    client = train_locally(step, memory=memory, finish=finish, **local)
    if learned is not None:
        load = local.get("load") or look_up
        federate_options["classes"] = functools.partial(learned.classes, load)
        client = _balanced(client, learned, load) if learned.task.balanced else client
    method = federate(around(client), **federate_options)._replace(learned=learned)
    if start is None:
        return method

    def init(key: jax.Array, variables: Variables, num_clients: int) -> Any:
        # `start` comes first, because the sharing rule must see the collections that it adds.
        return method.init(key, start(key, variables), num_clients)

    return method._replace(init=init)


def _balanced(client: Client, learned: Learning, load: Load) -> Client:
    """Returns the client whose batches have "class_weights" f[C], of the labels of the round."""

    def run(received: Received, batches: Batch, key: jax.Array) -> LocalUpdate:
        label, valid, classes = batches["label"], batches["valid"], learned.task.segments
        if classes:
            label = label["mask"]
        else:
            variables = complete(join(received.shared, received.personal))
            classes = learned.classes(load, variables, batches) or 1
        counts = sums_by_class(jnp.ones(label.shape), label, valid, classes)[1]
        weights = jnp.broadcast_to(balanced(counts), (len(valid), classes))  # for each step
        return client.run(received, batches | {"class_weights": weights}, key)

    return client._replace(run=run)


def supervised(learned: Learning, statistics: StatisticsRule | None = None) -> Objective:
    """Returns the objective of FedAvg: the task's loss, a mean over a batch's valid samples.

    `statistics` is the rule of the pass, by default the batch's own statistics.
    """

    def objective(variables: Variables, batch: Batch, received: Received, key: jax.Array) -> Value:
        images, valid = learned.read(variables, batch, key), batch["valid"]
        options: dict[str, Any] = {"statistics": statistics, "valid": valid, "key": key}
        # Not by `trained`, so that the call path from a round to the model is one frame shorter.
        out = forward(learned.model, variables, images, train=True, **options)
        loss = learned.loss(out.outputs, batch)
        return loss, (loss, out.moved)

    return objective
