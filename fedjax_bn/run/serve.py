"""The command `serve`: writes a model of a finished run, an unseen client's or a client's own."""

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import jax
from ml_collections import ConfigDict

from fedjax_bn import __version__
from fedjax_bn.adaptation import ensemble
from fedjax_bn.adaptation.choice import ADAPTATIONS
from fedjax_bn.arguments.choices import split_choice
from fedjax_bn.arguments.errors import ConfigError, as_config_errors
from fedjax_bn.arguments.text import nearest, shown
from fedjax_bn.normalization.batch_instance import gated_statistics
from fedjax_bn.run.config import assign
from fedjax_bn.run.evaluate import training_data
from fedjax_bn.run.experiment.build import choose_adaptations
from fedjax_bn.run.experiment.datasets import slices_in
from fedjax_bn.run.experiment.method import check_adaptations
from fedjax_bn.run.files import finished_run
from fedjax_bn.run.files.finished_run import recorded_code
from fedjax_bn.serving.folder import FORM, About, renew, write_served
from fedjax_bn.training.evaluation.evaluate import served_variables, variables_of_client
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.population import AnyState, PopulationState
from fedjax_bn.training.workdir import Record

_CHANGED = "adaptations", "statistics", "data.path"  # keys that `serve` takes


def run(
    folder: Path,
    to: Path,
    changes: Sequence[tuple[str, str]] = (),
    say: Callable[[str], None] = print,
    trust: bool = False,
    client: str = "",
) -> None:
    """Writes the selected round's model of the workdir `folder` into `to`, and how to use it.

    Args:
      changes: (key, text) pairs of `adaptations`, those to serve, `statistics`, of the client, and
        `data.path`, from which precise statistics read its training samples.
      trust: whether to import code that the run's folder names.
      client: whose own model is written; empty: what an unseen client receives. Unless `changes`
        has adaptations, it predicts as in `evaluate --internal`.
    """
    about = finished_run.read_about(folder)
    trained = finished_run.remembered(about, trust)
    trained.mesh.update(clients=1, batch=0)  # one device; the run's machine had others
    clients = about["form"]["clients"]
    if client and client not in clients:
        raise ConfigError(f"--client {client!r} is unknown{nearest(client, clients)}")
    config = _with_changes(trained, changes)
    check_adaptations(trained, config.adaptations)
    trained.adaptations = ()  # those of `config` are built below
    with recorded_code(folder, about, dict(changes).values(), trust), as_config_errors():
        experiment, state, number = finished_run.restore(folder, trained, about["form"])
        for note in _notes(experiment, state, bool(config.privacy), client):
            say(note)
        if client and "adaptations" not in dict(changes):
            statistics = experiment.method.statistics
            if statistics not in (None, gated_statistics):
                raise ConfigError("clients' statistics are not served: set config.adaptations")
            config.adaptations = ("learned_alpha" if statistics else "running",)
        variables = served_variables(state)
        if client:
            has_trained = finished_run.trained_clients(folder, clients, number)
            precise = config.statistics == "precise"
            built = training_data(config, trained, about) if precise else None
            variables = variables_of_client(state, clients.index(client), has_trained, built)
        facts = _facts(config, experiment, about["form"], number)._replace(client=client)
        choices = choose_adaptations(config, experiment.model)
        # Another model is served as a program alone.
        if facts.is_of_library and not find_spec("flatbuffers"):
            say("served without programs, which need flatbuffers")
            choices = {}
        write_served(to, facts, variables, choices)
    of_client = f", the model of {shown(client)}," * bool(client)
    say(f"round {number} of {trained.method} in {folder}{of_client} is served in {to}")


def renew_folder(folder: Path, say: Callable[[str], None] = print) -> None:
    """Writes the programs of a served folder anew; see `serving.folder.renew`."""
    with as_config_errors():
        incomparable = renew(folder)
        exported = About.read(folder).exported
    if incomparable:
        say(f"not compared, because the old programs do not run: {', '.join(incomparable)}")
    jax_version, until = exported["jax"], exported["until"]
    say(f"the programs in {folder} are those of JAX {jax_version} now, promised until {until}")


def _with_changes(trained: ConfigDict, changes: Sequence[tuple[str, str]]) -> ConfigDict:
    """Returns a run's configuration with the adaptations and statistics to serve."""
    config = trained.copy_and_resolve_references()
    for key, value in changes:
        if key not in _CHANGED:
            taken = ", ".join(_CHANGED)
            raise ConfigError(f"config.{key} is the run's own: `serve` takes {taken} alone")
        assign(config, key, value)
    texts = config.adaptations
    served = tuple(x for x in texts if split_choice(x, ADAPTATIONS)[0] != ensemble.__name__)
    if "adaptations" in dict(changes) and len(served) < len(texts):
        raise ConfigError("config.adaptations: ensemble needs all batch norms; leave it out")
    config.adaptations = served or ("running",)
    return config


def _facts(config: ConfigDict, experiment: Experiment, form: Record, number: int) -> About:
    """Returns the content of model.json, without programs, for the state of a round."""
    internal = experiment.internal
    facts = About(
        form=FORM,
        library=__version__,
        **{key: config[key] for key in ("model", "compute_dtype", "method")},
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
        scans = {key: getattr(slices, key) for key in ("channels", "crop", "plane")}
        return facts._replace(**scans, window=tuple(slices.window))
    return facts


def _notes(experiment: Experiment, state: AnyState, private: bool, client: str) -> Iterator[str]:
    """Yields what the user should know about the model; raises ConfigError for a detector."""
    if not (experiment.task.classifies or experiment.task.segments):
        raise ConfigError("serve writes no detector: use fedjax_bn.tasks.detection in Python")
    if experiment.evaluation.personalization:
        yield "the served model is not adapted to labelled samples first (personalize_samples)"
    personal = (state.state if isinstance(state, PopulationState) else state).personal
    if private and (leaves := len(jax.tree.leaves(personal))):
        model = f"the model of {shown(client)} with its" if client else "the clients' mean of"
        cover = "the run's epsilon does not cover it, see docs/privacy.md"
        yield f"{model} {leaves} personal leaves is served without noise: {cover}"
