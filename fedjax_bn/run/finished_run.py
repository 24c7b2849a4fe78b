"""The command `evaluate`: tests a finished run without training, also on new domains.

Training data are needed only if the internal clients are tested.

A published dataset has fixed names of domains, and a new hospital is not among them. So an archive
or a folder at another path is read with the domain names that it has, see `new_data`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from fedjax_bn import adaptation
from fedjax_bn.adaptation.adaptation import of_clients
from fedjax_bn.adaptation.choice import NEEDS, choose_adaptation
from fedjax_bn.arguments.errors import ConfigError, WorkdirError
from fedjax_bn.arguments.text import file_name
from fedjax_bn.data.division.clients import unseen_only
from fedjax_bn.data.domain import Dataset, Domain, scored_part, whole
from fedjax_bn.data.label_trees import form_of_labels
from fedjax_bn.federation import FederatedState
from fedjax_bn.normalization.adapter import COLLECTION
from fedjax_bn.run.config.file import read
from fedjax_bn.run.config.keys import assign, check, flatten
from fedjax_bn.run.config.trust import recorded_code
from fedjax_bn.run.experiment.build import TESTED_ON_VALIDATION, Experiment, build
from fedjax_bn.run.experiment.datasets import check_data_keys, check_target
from fedjax_bn.run.experiment.method import check_adaptations
from fedjax_bn.run.experiment.read_values import read_evaluation
from fedjax_bn.run.files import finished
from fedjax_bn.run.files.ownership import owned
from fedjax_bn.run.new_data import read_new, stretched
from fedjax_bn.training import workdir
from fedjax_bn.training.evaluation import evaluate, plots
from fedjax_bn.training.evaluation.answers import Keep, packed, predictions_of
from fedjax_bn.training.evaluation.per_sample import alphas_of, features_of
from fedjax_bn.training.evaluation.scoring import as_stored
from fedjax_bn.training.population import PopulationState
from fedjax_bn.training.programs import keep_compiled
from fedjax_bn.training.records import Record, by_client
from fedjax_bn.training.start import data_hash

_KINDS = ("alphas", "tsne", "predictions")  # of files beside NAME.json
_Content = bytes | str | Callable[[], bytes]  # of a file; a function draws a picture


class Request(NamedTuple):
    """What to test.

    Attributes:
      source: a config file whose data and adaptations are taken; empty: the run's own.
      changes: (key, text) pairs, changes of that configuration.
      name: of the files that are written.
      internal: whether the internal clients are tested too (FedIG, Table 12).
      alphas: whether alphas are recorded and plotted (FedIG, Fig. 4a, 7 to 9).
      tsne: whether features are plotted (FedIG, Fig. 4b).
      resize: whether u8 images of another size are stretched to the run's.
      trust: whether to import code that the run's folder names.
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
      say: prints a message.

    Returns:
      The content of NAME.json, and the paths of all files written.

    Raises:
      WorkdirError, CheckpointError: the folder holds no finished run, or a damaged one.
      ConfigError: a key, the data or an adaptation is wrong or does not suit the run.
    """
    about = finished.read_about(folder)
    trained = finished.remembered(about, request.trust)
    if request.source:
        config = read(request.source, request.changes)
        typed = dict(flatten(config))
        config.method = trained.method
    else:
        config, typed = trained.copy_and_resolve_references(), dict(request.changes)
        for key, value in request.changes:
            assign(config, key, value)
    check(config)
    # This machine may differ from the one that trained, so devices and cache are the test's.
    trained.update(mesh=config.mesh, compilation_cache=config.compilation_cache)
    if "adaptations" in typed:  # the run's are not tested
        trained.adaptations = ()
    check_adaptations(trained, config.adaptations)
    with recorded_code(folder, about, typed.values(), request.trust):
        try:
            result, contents = _tested(folder, request, about, trained, config, say)
        except (ValueError, OSError, ImportError) as error:
            raise ConfigError(str(error)) from error
    # A name such as "a-tsne" would look like a file of the evaluation "a".
    start = file_name(request.name)
    for kind in _KINDS:
        start = start.replace(f"-{kind}", f"%2D{kind}")
    place = folder / "evaluations"
    paths = [place / f"{start}{end}" for end in (*contents, ".json")]
    with owned(folder, wait=True):
        workdir.write_json(paths[-1], result)
        for path, content in zip(paths, contents.values(), strict=False):
            if callable(content):
                workdir.write_picture(path, content)
            else:
                workdir.write_atomically(path, content)
    return result, [path for path in paths if path.exists()]


def _tested(
    folder: Path,
    request: Request,
    about: Record,
    trained: ConfigDict,
    config: ConfigDict,
    say: Callable[[str], None],
) -> tuple[Record, dict[str, _Content]]:
    """Returns the content of NAME.json, and the further files as ending of the name -> content."""
    form = about["form"]
    keep_compiled(trained.compilation_cache)
    experiment, state, number = finished.restore(folder, trained, form)
    if request.tsne and not experiment.task.classifies:
        raise ConfigError(
            "--tsne needs the features of a classifier, and this run's model is another one: "
            "leave it out"
        )
    if request.alphas and COLLECTION not in evaluate.served_variables(state):
        raise ConfigError(
            f"--alphas needs an adapter, which this run does not have: {NEEDS['zero_shot_adapter']}"
        )
    tested = _domains_to_test(config, trained, form, request)
    choices = {
        spelling: choose_adaptation(spelling, experiment.model, config.adapt_batch_size)
        for spelling in config.adaptations
    }
    experiment = experiment._replace(
        unseen=tested.domains,
        adaptations=choices,
        evaluation=read_evaluation(config, experiment.method),
    )
    say(f"round {number} of {trained.method} in {folder}")
    answers: Keep = {}
    record = evaluate.unseen_evaluator(experiment)(state, answers)
    scores, inside, notes, tested_on = record.get("unseen", {}), {}, [], {}
    measures = {"internal": {}, "unseen": record.get("unseen_measures", {})}
    if request.internal:
        has_trained = finished.trained_clients(folder, form["clients"], number)
        built = _training_data(config, trained, about)
        scores_inside = evaluate.internal_evaluator(built)(state, has_trained, answers)
        measures["internal"] = scores_inside.get("measures", {})
        inside = {"own": scores_inside["accuracy"]} | _served_scores(experiment, built, state)
        tested_on = {"tested_on": {"internal": scored_part(built.internal.domains)}}
        if TESTED_ON_VALIDATION in built.notes:
            say(TESTED_ON_VALIDATION)
            notes = [TESTED_ON_VALIDATION]
    files: dict[str, _Content] = dict(plots.ablations(scores, experiment.task.score.name))
    files |= _plots(experiment, state, tested, request, config.data.name)
    if config.predictions and answers:
        end = f"-predictions.{config.predictions}"
        files[end] = predictions_of(answers, config.predictions)
    classifies = experiment.task.classifies
    return {
        "method": trained.method,
        "round": number,
        "seed": trained.seed,
        "dataset": tested.name,
        "samples": {domain.name: len(whole(domain).images) for domain in tested.domains},
        "unseen": scores,
        "internal": inside,
        **tested_on,
        **({"notes": notes} if notes else {}),
        **({"measures": measures} if any(measures.values()) else {}),
        "config": dict(flatten(config)),
        **({} if classifies else {"score": experiment.task.score.name}),
    }, files


def _domains_to_test(
    config: ConfigDict, trained: ConfigDict, form: Record, request: Request
) -> Dataset:
    """Returns the domains to test, each whole: those of `target`, or all if it is empty.

    The run's own target applies only to the run's own data.

    Raises:
      ConfigError: there is nothing to test, or the samples have another form than the run's.
    """
    same = all(config.data[key] == trained.data[key] for key in ("name", "path"))
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
    data = read_new(config, trained, form)
    check_target(data, config)
    tested = unseen_only(data, target=config.target, seed=config.seed)
    if request.resize:
        stored = [(domain.name, as_stored(whole(domain))) for domain in tested.domains]
        domains = (
            Domain(name, None, None, stretched(split, form["shape"])) for name, split in stored
        )
        tested = tested._replace(domains=tuple(domains))
    if tested.domains:
        images, labels, _ = tested.domains[0].test
        kinds = [{"boxes", "masks"} & of.keys() for of in (form, form_of_labels(labels))]
        if kinds[0] != kinds[1]:
            run_kind, test_kind = (" and ".join(kind) or "one class" for kind in kinds)
            raise ConfigError(
                f"the run was trained on samples with {run_kind} each, but those of {tested.name} "
                f"have {test_kind}: give data with labels of the same kind"
            )
        test_form = (list(images.shape[1:]), str(images.dtype), tested.num_classes)
        run_form = (form["shape"], form["dtype"], form["num_classes"])
        if test_form != run_form:
            raise ConfigError(
                "the run was trained on samples of shape {} ({}) in {} classes".format(*run_form)
                + ", but those to test have {} ({}) in {}".format(*test_form)
                + ": give data of the same form; --resize brings images to the run's size"
            )
    return tested


def _training_data(config: ConfigDict, trained: ConfigDict, about: Record) -> Experiment:
    """Returns the run's own experiment; its data may have moved to the path that the test names.

    Raises:
      WorkdirError: the data are not those that the run was trained on.
    """
    moved = trained.copy_and_resolve_references()
    if config.data.name == trained.data.name:
        moved.data.path, moved.data.cache = config.data.path, config.data.cache
    built = build(moved)
    if data_hash(built) != about["data"]:
        raise WorkdirError(
            f"the data in {moved.data.path or moved.data.name} are not those of the run (their "
            "hash differs): give --config.data.path of the data it was trained on"
        )
    return built


def _served_scores(
    experiment: Experiment, built: Experiment, state: FederatedState | PopulationState
) -> Record:
    """Returns adaptation -> accuracy of internal clients by the global model (FedIG, Table 12)."""
    domains = built.internal.domains
    domains = [domains[k] for k in evaluate.clients_tested(built.evaluation, len(domains))]
    # Clients of one domain share a test split and the global model, so each split is tested once.
    tests = {id(domain.test): Domain(domain.name, None, None, domain.test) for domain in domains}
    served = experiment._replace(unseen=tuple(tests.values()))
    scores, names = evaluate.unseen_evaluator(served)(state)["unseen"], [d.name for d in domains]
    rows = {}
    for spelling in experiment.adaptations:
        row = [scores[tests[id(domain.test)].name][spelling] for domain in domains]
        rows[spelling] = by_client(names, row, built.plan.clients_named)
    return rows


def _plots(
    experiment: Experiment,
    state: FederatedState | PopulationState,
    tested: Dataset,
    request: Request,
    dataset: str,
) -> Iterator[tuple[str, _Content]]:
    """Yields (ending of the file's name, content) of the alphas and plots that were requested."""
    variables = evaluate.served_variables(state)
    makers, rule = {"running": adaptation.running}, experiment.method.statistics
    if rule is not None:
        makers = {"as its clients predict": partial(of_clients, statistics=rule)}
    if COLLECTION in variables:
        makers["zero_shot_adapter"] = adaptation.zero_shot_adapter
    for domain in tested.domains:
        title, end = f"{dataset}, {domain.name}", file_name(domain.name)
        samples = experiment.model, experiment.prepare, variables, whole(domain)
        if request.alphas:
            values = alphas_of(*samples)
            yield f"-alphas-{end}.npz", packed(values)
            yield f"-alphas-{end}.png", partial(plots.alphas, values, title)
        if request.tsne:
            features = {name: features_of(make, *samples) for name, make in makers.items()}
            labels = whole(domain).labels
            yield f"-tsne-{end}.png", partial(plots.embeddings, features, labels, tested.classes)
