"""The command `serve`: writes a model of a finished run, an unseen client's or a client's own."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from fedjax_bn import __version__
from fedjax_bn.adaptation import ensemble
from fedjax_bn.adaptation.choice import ADAPTATIONS, choose_adaptation
from fedjax_bn.arguments.choices import split_choice
from fedjax_bn.arguments.errors import ConfigError, as_config_errors
from fedjax_bn.arguments.text import brief, nearest, shown
from fedjax_bn.federation import FederatedState
from fedjax_bn.normalization.batch_instance import gated_statistics
from fedjax_bn.run.config.keys import assign, check
from fedjax_bn.run.config.trust import recorded_code
from fedjax_bn.run.experiment.datasets import slices_in
from fedjax_bn.run.experiment.method import check_adaptations
from fedjax_bn.run.files import finished
from fedjax_bn.serving import folder as served
from fedjax_bn.serving.program import export
from fedjax_bn.training.evaluation.evaluate import served_variables, variables_of_client
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.population import PopulationState


def run(
    folder: Path,
    to: Path,
    changes: Sequence[tuple[str, str]] = (),
    say: Callable[[str], None] = print,
    trust: bool = False,
    client: str = "",
) -> None:
    """Writes the selected round's model, and how to use it.

    Args:
      folder: the run's workdir.
      to: the folder that is written.
      changes: (key, text) pairs; the only key allowed is `adaptations`, those to serve.
      say: prints a message.
      trust: whether to import code that the run's folder names.
      client: whose own model is written, with the way in which `evaluate --internal` predicts
        unless `changes` names adaptations; empty: what an unseen client receives.

    Raises:
      WorkdirError, CheckpointError: the workdir holds no finished run, or a damaged one.
      ConfigError: there is no such client, an adaptation does not suit the run, or the folder
        cannot be written.
    """
    about = finished.read_about(folder)
    own = finished.remembered(about, trust)
    own.mesh.update(clients=1, batch=0)  # one device; the run's machine had others
    clients = about["form"]["clients"]
    if client and client not in clients:
        raise ConfigError(f"--client {brief(client)} is unknown{nearest(client, clients)}")
    config = own.copy_and_resolve_references()
    for key, text in changes:
        if key != "adaptations":
            raise ConfigError(
                f"config.{key} is the run's own and served as it is: of all keys, `serve` takes "
                "adaptations alone"
            )
        assign(config, key, text)
    names = {text: split_choice(text, ADAPTATIONS)[0] for text in config.adaptations}
    kept = [text for text, name in names.items() if name != ensemble.__name__]
    if changes and len(kept) < len(names):
        raise ConfigError(
            "config.adaptations has ensemble, which needs the batch norms of every client, and "
            "those do not leave: choose other adaptations"
        )
    config.adaptations = tuple(kept) or ("running",)
    check(config)
    check_adaptations(own, config.adaptations)
    own.adaptations = ()  # those of `config` are built below
    with recorded_code(folder, about, dict(changes).values(), trust), as_config_errors():
        experiment, state, number = finished.restore(folder, own, about["form"])
        for note in _notes(experiment, state, config.privacy.clip > 0, client):
            say(note)
        if client and not changes:
            config.adaptations = (_as_clients_predict(experiment.method.statistics),)
        internal, form = experiment.internal, about["form"]
        facts = served.About(
            form=served.FORM,
            library=__version__,
            model=config.model,
            compute_dtype=config.compute_dtype,
            method=config.method,
            dataset=internal.name,
            round=number,
            classes=form.get("classes") or [str(i) for i in range(internal.num_classes)],
            shape=list(form["shape"]),
            dtype=form["dtype"],
            mean=[float(x) for x in internal.mean],
            std=[float(x) for x in internal.std],
            adaptations=list(config.adaptations),
            programs={},
            batch_size=config.adapt_batch_size,
            orientation=config.data.orientation,
            masks=config.data.large if experiment.task.segments else "",
        )
        if slices := slices_in(config, form):
            facts = facts._replace(
                **{"channels": slices.channels, "crop": slices.crop},
                **{"plane": slices.plane, "window": list(slices.window)},
            )
        variables, shape, programs = served_variables(state), tuple(facts.shape), {}
        if client:
            facts = facts._replace(client=client)
            trained = finished.trained_clients(folder, clients, number)
            variables = variables_of_client(state, clients.index(client), trained)
        for text in config.adaptations:
            choice = choose_adaptation(text, experiment.model, config.adapt_batch_size)
            try:
                programs[text] = export(choice, variables, experiment.prepare, shape, facts.dtype)
            except ImportError as error:  # flatbuffers is not installed
                if not served.is_ours(config.model):
                    raise ConfigError(
                        f"config.model={brief(config.model)} is your own, served as a program: "
                        f"{error}"
                    ) from error
                say(f"served without programs: {error}")
                programs = {}
                break
        served.write(to, facts, variables, programs)
    of_client = f", the model of {shown(client)}," if client else ""
    say(f"round {number} of {own.method} in {folder}{of_client} is served in {to}")
    used = ("--model", str(to), "--data", "IMAGES", "--adapt", config.adaptations[0])
    out = ("--out", "FOLDER") if experiment.task.segments else ()
    adaptation = split_choice(config.adaptations[0], ADAPTATIONS)[0]
    trust_flag = () if served.is_ours(config.model) and adaptation in ADAPTATIONS else ("--trust",)
    say(shlex.join(("fedjax-bn", "predict", *used, *out, *trust_flag)))


def _as_clients_predict(statistics: Callable[..., Any] | None) -> str:
    """Returns the adaptation that predicts by a method's rule for its own clients.

    Raises:
      ConfigError: no adaptation of this library does.
    """
    adaptations = {None: "running", gated_statistics: "learned_alpha"}
    if statistics not in adaptations:
        raise ConfigError(
            "the method's clients predict by a statistics rule of its own, which a served model "
            "does not hold: name adaptations with --config.adaptations, or predict in Python with "
            "fedjax_bn.load_run(WORKDIR).predict(images, client=NAME)"
        )
    return adaptations[statistics]


def _notes(
    experiment: Experiment, state: FederatedState | PopulationState, private: bool, client: str
) -> Iterator[str]:
    """Yields what the user should know about the model; raises ConfigError for a detector."""
    if not (experiment.task.classifies or experiment.task.segments):
        raise ConfigError(
            "serve writes a model whose outputs are probabilities of classes, and this run has a "
            "detector: use fedjax_bn.tasks.detection in Python"
        )
    if experiment.evaluation.personalization:
        yield (
            "evaluate lets clients adapt to labelled samples first (personalize.samples); "
            "the served model is the one before that"
        )
    personal = (state.state if isinstance(state, PopulationState) else state).personal
    if private and (own := len(jax.tree.leaves(personal))):
        served_leaves = (
            f"the model of {shown(client)} with its" if client else "the clients' mean of"
        )
        yield (
            f"{served_leaves} {own} personal leaves is served without noise: the run's epsilon "
            "does not cover it, see docs/privacy.md"
        )
