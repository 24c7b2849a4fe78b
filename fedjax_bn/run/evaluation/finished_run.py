"""The command `evaluate`: a finished run on domains that it may never have heard of, no training.

Its training data are needed only where its internal clients are tested.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from fedjax_bn import adaptation
from fedjax_bn.adaptation.adaptation import of_clients
from fedjax_bn.adaptation.choice import NEEDS, choose_adaptation
from fedjax_bn.arguments.text import file_name
from fedjax_bn.data.division.clients import unseen_only
from fedjax_bn.data.domain import Dataset, Domain, whole
from fedjax_bn.data.pixels.resize import resized
from fedjax_bn.federation import FederatedState
from fedjax_bn.normalization.adapter import COLLECTION
from fedjax_bn.report import unseen
from fedjax_bn.run.config.file import read
from fedjax_bn.run.config.keys import assign, check, flatten
from fedjax_bn.run.config.trust import recorded_code
from fedjax_bn.run.errors import ConfigError, WorkdirError
from fedjax_bn.run.evaluation.answers import Keep
from fedjax_bn.run.evaluation.answers_file import predictions_of
from fedjax_bn.run.evaluation.block_evaluate import clients_tested
from fedjax_bn.run.evaluation.evaluate import internal_evaluator
from fedjax_bn.run.evaluation.groups import by_client
from fedjax_bn.run.evaluation.new_data import read_new
from fedjax_bn.run.evaluation.per_sample import alphas_of, features_of
from fedjax_bn.run.evaluation.scoring_data import as_stored
from fedjax_bn.run.evaluation.unseen import served_variables, unseen_evaluator
from fedjax_bn.run.experiment.build import TESTED_ON_VALIDATION, Experiment, build
from fedjax_bn.run.experiment.datasets import check_data_keys, check_target
from fedjax_bn.run.experiment.method import check_adaptations
from fedjax_bn.run.experiment.start import data_hash
from fedjax_bn.run.files import finished, workdir
from fedjax_bn.run.files.ownership import owned
from fedjax_bn.run.training.records import Record, have_trained

_KINDS = ("alphas", "tsne", "predictions")  # of files beside NAME.json


class Request(NamedTuple):
    """What to test.

    Attributes:
      source: a config file whose data and adaptations are taken; empty: the run's own.
      changes: (key, text) pairs, changes of that configuration.
      name: of the files that are written.
      internal: whether the internal clients are tested too (FedIG, Table 12).
      alphas: whether alphas are recorded and plotted (FedIG, Fig. 4a, 7 to 9).
      tsne: whether features are plotted (FedIG, Fig. 4b).
      resize: whether bytes of another size than the run's are stretched to it.
      trust: whether code is imported that the run's folder names.
    """

    source: str = ""
    changes: Sequence[tuple[str, str]] = ()
    name: str = "evaluation"
    internal: bool = False
    alphas: bool = False
    tsne: bool = False
    resize: bool = False
    trust: bool = False


def run(folder: Path, request: Request, say: Callable[[str], None] = print) -> tuple[Record, list]:
    """Tests a finished run and writes FOLDER/evaluations/NAME.json, and its plots beside it.

    Args:
      folder: the run's workdir.
      request: what to test.
      say: where messages go.

    Returns:
      The content of NAME.json, and the paths of all files written.

    Raises:
      WorkdirError, CheckpointError: the folder holds no finished run, or a damaged one.
      ConfigError: a key, the data or an adaptation is wrong or does not suit the run.
    """
    about = finished.read_about(folder)
    own = finished.remembered(about, request.trust)
    config, typed = _wanted(own, request)
    # The devices that are here now, and a folder that the user of today names.
    own.update(mesh=config.mesh, compilation_cache=config.compilation_cache)
    if "adaptations" in typed:  # the run's are not tested
        own.adaptations = ()
    check_adaptations(own, config.adaptations)
    with recorded_code(folder, about, typed.values(), request.trust):
        result, contents = _tested(folder, request, about, own, config, say)
    place = folder / "evaluations"
    with owned(folder, wait=True):
        for name, content in contents.items():
            workdir.write_atomically(place / name, content)
        workdir.write_json(place / f"{_start_of_names(request.name)}.json", result)
    names = (*contents, f"{_start_of_names(request.name)}.json")
    return result, [place / name for name in names]


def _tested(
    folder: Path,
    request: Request,
    about: Record,
    own: ConfigDict,
    config: ConfigDict,
    say: Callable[[str], None],
) -> tuple[Record, dict[str, bytes | str]]:
    """The content of NAME.json, and name -> content of the files beside it.

    Raises:
      ConfigError, CheckpointError, WorkdirError: as `run`.
    """
    try:
        experiment, state, number = finished.restore(folder, own, about["form"])
        tested = _tested_domains(config, own, request, about["form"])
        _check_form(tested, about["form"])
        experiment = experiment._replace(
            unseen=tested.domains,
            adaptations={
                text: choose_adaptation(text, experiment.model, config.adapt_batch_size)
                for text in config.adaptations
            },
        )
        say(f"round {number} of {own.method} in {folder}")
        answers: Keep = {}
        told = unseen_evaluator(config, experiment)(state, answers)
        scores, inside, notes = told.get("unseen", {}), {}, []
        measures = {"internal": {}, "unseen": told.get("unseen_measures", {})}
        if request.internal:
            trained = _trained(folder, own, number, about["form"]["clients"])
            inside = _internal_scores(config, own, experiment, state, about, trained, answers)
            measures["internal"] = inside.pop("measures", {})
            if inside.pop("on_validation"):
                say(TESTED_ON_VALIDATION)
                notes = [TESTED_ON_VALIDATION]
        pictures = dict(_draw(config, experiment, state, tested, request, scores))
        if config.predictions and answers:
            end = f"-predictions.{config.predictions}"
            pictures[end] = predictions_of(answers, config.predictions)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error
    result = {
        "method": own.method,
        "round": number,
        "seed": own.seed,
        "dataset": tested.name,
        "samples": {domain.name: len(whole(domain).images) for domain in tested.domains},
        "unseen": scores,
        "internal": inside,
        **({"notes": notes} if notes else {}),
        **({"measures": measures} if experiment.task.classifies else {}),
        "config": dict(flatten(config)),
    }
    if not experiment.task.classifies:
        result["score"] = experiment.task.score.name
    start = _start_of_names(request.name)
    return result, {f"{start}{end}": picture for end, picture in pictures.items()}


def _start_of_names(name: str) -> str:
    """What the names of an evaluation's files begin with, none of which another's can have."""
    start = file_name(name)
    for kind in _KINDS:
        start = start.replace(f"-{kind}", f"%2D{kind}")
    return start


def _wanted(own: ConfigDict, request: Request) -> tuple[ConfigDict, dict[str, Any]]:
    """The configuration of the test, a file's or the run's own with changes; what the user gave.

    Raises:
      ConfigError: as `config_file.read` and `config.check`.
    """
    if request.source:
        config = read(request.source, request.changes)
        typed = dict(flatten(config))
        config.method = own.method
    else:
        config, typed = own.copy_and_resolve_references(), dict(request.changes)
        for key, text in request.changes:
            assign(config, key, text)
    check(config)
    return config, typed


def _tested_domains(config: ConfigDict, own: ConfigDict, request: Request, form: Record) -> Dataset:
    """The domains to test, each whole: `target`, and of other data than the run's own all.

    The run's own target counts for its own data only.

    Raises:
      ConfigError: there is nothing to test, or the data are not there.
    """
    same = all(config.data[key] == own.data[key] for key in ("name", "path"))
    if same and not config.target:
        if request.internal:
            return Dataset(config.data.name, 0, (), (), ())
        raise ConfigError(
            "the run left no domain out, so there is nothing unseen to test: name a domain with "
            "--config.target=NAME, new data with --config.data.path=PATH, or add --internal"
        )
    if not same and not request.source and "target" not in dict(request.changes):
        config.target = ""
    check_data_keys(config)
    data = read_new(config, own, form)
    check_target(data, config)
    tested = unseen_only(data, target=config.target, seed=config.seed)
    return _stretched(tested, form) if request.resize else tested


def _stretched(tested: Dataset, form: Record) -> Dataset:
    """The domains with images of the run's size, see `resize.resized`."""

    def stretch(domain: Domain) -> Domain:
        split = as_stored(whole(domain))
        images = resized(split.images, form["shape"])
        return Domain(domain.name, None, None, split._replace(images=images))

    return tested._replace(domains=tuple(map(stretch, tested.domains)))


def _check_form(tested: Dataset, form: Record) -> None:
    """Raises ConfigError if samples to test have another form than those of the run."""
    if not tested.domains:
        return
    images = next(iter(tested.domains)).test.images
    given = (list(images.shape[1:]), str(images.dtype), tested.num_classes)
    needed = (form["shape"], form["dtype"], form["num_classes"])
    if given != needed:
        raise ConfigError(
            "the run was trained on samples of shape {} ({}) in {} classes".format(*needed)
            + ", but those to test have {} ({}) in {}".format(*given)
            + ": give data of the same form; --resize brings images to the run's size"
        )


def _trained(folder: Path, own: ConfigDict, number: int, names: list[str]) -> np.ndarray | None:
    """Which clients have trained up to a round, bool[K]; None where all do in every round."""
    keys = own.participation
    if not (own.clients_per_round or keys.trace or keys.dropout):
        return None
    return have_trained(workdir.read_lines(folder / "metrics.jsonl", number), names)


def _internal_scores(
    config: ConfigDict,
    own: ConfigDict,
    experiment: Experiment,
    state: FederatedState,
    about: Record,
    trained: np.ndarray | None,
    answers: Keep,
) -> Record:
    """Accuracy of the internal clients with their own and with the global model (Table 12).

    `trained` and `answers` as `run.evaluate.internal_evaluator` takes them. Beside the rows are the
    "measures" of their own models, and whether the samples are "on_validation".

    Raises:
      WorkdirError: the data are not those that the run was trained on.
    """
    theirs = own.copy_and_resolve_references()
    for key in ("path", "cache"):
        theirs.data[key] = config.data[key] if config.data.name == own.data.name else own.data[key]
    built = build(theirs)
    if data_hash(built) != about["data"]:
        raise WorkdirError(
            f"the data in {theirs.data.path or theirs.data.name} are not those of the run (their "
            "hash differs): give --config.data.path of the data it was trained on"
        )
    domains = [
        built.internal.domains[k] for k in clients_tested(theirs, len(built.internal.domains))
    ]
    mine = internal_evaluator(theirs, built)(state, trained, answers)
    rows = {"own": mine["accuracy"], "measures": mine.get("measures", {})}
    rows["on_validation"] = TESTED_ON_VALIDATION in built.notes
    # Clients of one domain have one test split, and the same global model.
    tests = {id(domain.test): Domain(domain.name, None, None, domain.test) for domain in domains}
    scores = unseen_evaluator(config, experiment._replace(unseen=tuple(tests.values())))(state)
    by_split = {name: scores["unseen"][domain.name] for name, domain in tests.items()}
    names = [domain.name for domain in domains]
    for text in config.adaptations:
        row = [by_split[id(domain.test)][text] for domain in domains]
        rows[text] = by_client(names, row, theirs.clients_named)
    return rows


def _draw(
    config: ConfigDict,
    experiment: Experiment,
    state: FederatedState,
    tested: Dataset,
    request: Request,
    scores: Record,
) -> Iterator[tuple[str, bytes]]:
    """(end of the file's name, its bytes) of all that was asked for."""
    yield from unseen.ablations(scores)
    variables = served_variables(state, ())
    adapted = COLLECTION in variables
    if request.tsne and not experiment.task.classifies:
        raise ConfigError("--tsne needs the features of a classifier, and this run has a detector")
    if request.alphas and not adapted:
        raise ConfigError(
            f"--alphas needs an adapter, which this run does not have: {NEEDS['zero_shot_adapter']}"
        )
    model, prepare = experiment.model, experiment.prepare
    for domain in tested.domains:
        split, title = whole(domain), f"{config.data.name}, {domain.name}"
        if request.alphas:
            values = alphas_of(model, prepare, variables, split)
            file = io.BytesIO()
            np.savez_compressed(file, **values)
            yield f"-alphas-{file_name(domain.name)}.npz", file.getvalue()
            yield f"-alphas-{file_name(domain.name)}.png", unseen.alphas(values, title)
        if request.tsne:
            rule = experiment.method.statistics
            makers = {"running": adaptation.running}
            if rule is not None:
                makers = {"as its clients predict": partial(of_clients, statistics=rule)}
            if adapted:
                makers["zero_shot_adapter"] = adaptation.zero_shot_adapter
            features = {
                name: features_of(make, model, prepare, variables, split)
                for name, make in makers.items()
            }
            picture = unseen.embeddings(features, split.labels, tested.classes)
            yield f"-tsne-{file_name(domain.name)}.png", picture
