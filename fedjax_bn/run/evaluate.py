"""The command `evaluate`: tests a finished run without training, also on new domains.

Training data are needed only if the internal clients are tested. Data at another path are read with
the domains that are there, whose classes are those of the run (a domain need not have all of them):

    PATH/DOMAIN/CLASS/*.jpg  or  PATH/CLASS/*.jpg  or  PATH.npz with arrays as in `data.sets.npz`
    PATH/DOMAIN/images/*.png with masks in PATH/DOMAIN/masks, as `data.name=masks` reads them
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from fedjax_bn import adaptation
from fedjax_bn.adaptation.adaptation import of_clients
from fedjax_bn.adaptation.choice import NEEDS
from fedjax_bn.arguments.errors import ConfigError, WorkdirError, as_config_errors
from fedjax_bn.arguments.text import file_name
from fedjax_bn.data.division.clients import unseen_only
from fedjax_bn.data.domain import Dataset, Domain, Split, scored_part, whole
from fedjax_bn.data.labels import MASK, form_of_labels, has_masks
from fedjax_bn.data.pixels.decode import resized
from fedjax_bn.data.sets import folders, npz
from fedjax_bn.data.sets.image_folders import IMAGE_FOLDERS
from fedjax_bn.data.source import Source
from fedjax_bn.normalization.adapter import COLLECTION
from fedjax_bn.run.config import assign, check, flatten
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment import build
from fedjax_bn.run.experiment.datasets import decoding, read_data
from fedjax_bn.run.experiment.method import check_adaptations
from fedjax_bn.run.files import finished_run
from fedjax_bn.run.files.finished_run import recorded_code
from fedjax_bn.run.files.ownership import owned
from fedjax_bn.training import plots, score_tables, workdir
from fedjax_bn.training.evaluation.answers import Keep, npz_bytes, predictions_of
from fedjax_bn.training.evaluation.evaluate import (
    clients_tested,
    internal_evaluator,
    served_variables,
    unseen_evaluator,
)
from fedjax_bn.training.evaluation.scoring import as_stored
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.mesh import on_one_device
from fedjax_bn.training.plots import alphas_of, features_of
from fedjax_bn.training.population import AnyState
from fedjax_bn.training.programs import keep_compiled
from fedjax_bn.training.records import Record, by_client
from fedjax_bn.training.start import data_hash

_Content = bytes | str | Callable[[], bytes]  # of a file; a function draws a picture
_OF_USERS = ("folders", "masks", "npz")  # datasets that are a user's own


class Request(NamedTuple):
    """What to test."""

    source: str = ""  # a config file whose data and adaptations are taken; empty: the run's own
    changes: Sequence[tuple[str, str]] = ()  # (key, text) pairs, changes of that configuration
    name: str = "evaluation"  # of the files that are written
    internal: bool = False  # whether the internal clients are tested too (FedIG, Table 12)
    alphas: bool = False  # whether alphas are recorded and plotted (FedIG, Fig. 4a, 7 to 9)
    tsne: bool = False  # whether features are plotted (FedIG, Fig. 4b)
    resize: bool = False  # whether u8 images of another size are stretched to the run's
    trust: bool = False  # whether to import code that the run's folder names


def run(folder: Path, request: Request, say: Callable[[str], None] = print) -> tuple[Record, list]:
    """Tests a finished run and writes FOLDER/evaluations/NAME.json, and its plots beside it.

    Returns the content of NAME.json, and the paths of all files written. What does not suit the
    run is a ConfigError, a workdir that cannot be read a WorkdirError or CheckpointError.
    """
    about = finished_run.read_about(folder)
    trained = finished_run.remembered(about, request.trust)
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
    trained.data.device_megabytes = config.data.device_megabytes
    if "adaptations" in typed:  # the run's are not tested
        trained.adaptations = ()
    check_adaptations(trained, config.adaptations)
    keep_compiled(trained.compilation_cache)
    with recorded_code(folder, about, typed.values(), request.trust), as_config_errors():
        result, contents = _tested(folder, request, about, trained, config, say)
    place, start = folder / "evaluations", file_name(request.name)
    files = {place / f"{start}{end}": content for end, content in contents.items()}
    with owned(folder, wait=True):
        workdir.write_json(place / f"{start}.json", result)
        for path, content in files.items():
            if callable(content):
                workdir.write_picture(path, content)
            else:
                workdir.write_atomically(path, content)
    return result, [path for path in (*files, place / f"{start}.json") if path.exists()]


def evaluate(folder: Path, request: Request) -> None:
    """Tests a finished run without training, and prints its scores and the files written."""
    result, files = run(folder, request)
    part, score = score_tables.part_tested(result), result.get("score", "accuracy")
    tested = "" if part == "test" else f"{part} "
    measures = result.get("measures", {"internal": {}, "unseen": {}})
    inside = _transposed(measures["internal"])
    if "mean" in inside and "counts" in measures["internal"]:
        over = result["measures_over"]
        inside["mean"]["counts"] = f"{over['auc']} of {over['loss']} clients have two classes"
    tables = {
        f"unseen, {score} %": _transposed(result["unseen"]),
        f"internal, {tested}{score} %": result["internal"],
        **{f"unseen, {domain}": rows for domain, rows in measures["unseen"].items()},
        f"internal, own{tested and f' ({part})'}": inside,
    }
    for title, rows in tables.items():
        if rows:
            print(f"\n{score_tables.accuracies(rows, title, score_tables.OF_MEASURES)}")
    print(f"\nround {result['round']}; written: {', '.join(map(str, files))}")


def _transposed(rows: Record) -> Record:
    """Returns {column: {row: value}} of {row: {column: value}}."""
    columns = next(iter(rows.values()), {})
    return {column: {name: row.get(column) for name, row in rows.items()} for column in columns}


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
    experiment, state, number = finished_run.restore(folder, trained, form)
    if request.tsne and not experiment.task.classifies:
        raise ConfigError("--tsne needs the features of a classifier")
    if request.alphas and COLLECTION not in served_variables(state):
        raise ConfigError(f"--alphas: {NEEDS['zero_shot_adapter']}")
    tested = _domains_to_test(config, trained, form, request)
    experiment = experiment._replace(
        unseen=tested.domains,
        adaptations=build.choose_adaptations(config, experiment.model),
        evaluation=build.read_evaluation(config, experiment.method),
    )
    say(f"round {number} of {trained.method} in {folder}")
    answers: Keep = {}
    record = unseen_evaluator(experiment)(state, answers)
    result: Record = {
        "method": trained.method,
        "round": number,
        "seed": trained.seed,
        "dataset": tested.name,
        "samples": {domain.name: len(whole(domain).images) for domain in tested.domains},
        "unseen": record.get("unseen", {}),
        "internal": {},
        "config": dict(flatten(config)),
    }
    measures = {"internal": {}, "unseen": record.get("unseen_measures", {})}
    if request.internal:
        has_trained = finished_run.trained_clients(folder, form["clients"], number)
        built = training_data(config, trained, about)
        inside = internal_evaluator(built)(state, has_trained, answers)
        measures["internal"] = inside.get("measures", {})
        result["measures_over"] = inside.get("measures_over", {})
        served = _served_scores(experiment, built, state)
        result["internal"] = {"own": inside["accuracy"]} | served
        result["tested_on"] = {"internal": scored_part(built.internal.domains)}
        if build.TESTED_ON_VALIDATION in built.notes:
            say(build.TESTED_ON_VALIDATION)
            result["notes"] = [build.TESTED_ON_VALIDATION]
    if any(measures.values()):
        result["measures"] = measures
    if not experiment.task.classifies:
        result["score"] = experiment.task.score.name
    files: dict[str, _Content] = dict(plots.ablations(result["unseen"], experiment.task.score.name))
    files |= _plots(experiment, state, tested, request)
    if config.predictions and answers:
        files[f"-predictions.{config.predictions}"] = predictions_of(answers, config.predictions)
    return result, files


def _domains_to_test(
    config: ConfigDict, trained: ConfigDict, form: Record, request: Request
) -> Dataset:
    """Returns the domains to test, each whole: those of `target`, or all if it is empty."""
    # The run's own target applies only to the run's own data.
    same = all(config.data[key] == trained.data[key] for key in ("name", "path"))
    if same and not config.target:
        if request.internal:
            return Dataset(config.data.name, 0, (), (), ())
        raise ConfigError("the run left no domain out: set config.target, data.path or --internal")
    if not same and not request.source and "target" not in dict(request.changes):
        config.target = ""
    data = read_new(config, trained, form)
    tested = unseen_only(data, target=config.target, seed=config.seed)
    if request.resize:  # arrays; image files are decoded to the run's size anyway
        stored = [(domain.name, as_stored(whole(domain))) for domain in tested.domains]
        domains = [Domain(n, None, None, _stretched(split, form["shape"])) for n, split in stored]
        tested = tested._replace(domains=tuple(domains))
    images, labels, _ = tested.domains[0].test
    form_tested = {"shape": list(images.shape[1:]), "dtype": str(images.dtype)}
    form_tested |= {"num_classes": tested.num_classes} | form_of_labels(labels)
    if _in_words(form_tested) != _in_words(form):
        raise ConfigError(
            f"samples of the run have {_in_words(form)}, those to test {_in_words(form_tested)}: "
            "--resize brings images to the run's size"
        )
    return tested


def _in_words(form: Record) -> str:
    labels = next((kind for kind in ("masks", "boxes") if kind in form), "one class")
    shape, dtype, count = (form[key] for key in ("shape", "dtype", "num_classes"))
    return f"shape {shape} ({dtype}) in {count} classes, with {labels} each"


def read_new(config: ConfigDict, trained: ConfigDict, form: Record) -> Source | Dataset:
    """Returns the data to test, see the module's docstring; errors are those of the readers."""
    name, domains = config.data.name.partition(":")[0], config.data.domains
    path = Path(config.data.path).expanduser()
    moved = config.data.path and config.data.path != trained.data.path
    if not moved or not (config.data.name == trained.data.name or name in _OF_USERS):
        return read_data(config)
    numbers = [str(label) for label in range(form["num_classes"])]  # if the run recorded no names
    if path.suffix == ".npz":
        return npz.load_npz(path, domains=domains, classes=form.get("classes") or numbers)
    if name == "masks":  # new masks need not have all classes, so those of the run are named
        config.data.classes = config.data.classes or tuple(form.get("classes", ()))
        return read_data(config)
    inside, classes = folders.subfolders(path), {}
    if name in IMAGE_FOLDERS:
        published, classes = IMAGE_FOLDERS[name].domains, dict(IMAGE_FOLDERS[name].classes)
        for root in (path, *inside):  # a copy of the published folder, or a folder that holds it
            if len(folders.match_folders(folders.subfolders(root), published)) == len(published):
                return read_data(config)
    elif name == "folders":
        names = config.data.classes or form.get("classes", ())
        classes = dict.fromkeys(names if names or trained.data.name in _OF_USERS else numbers, ())
    if not classes:  # another reader
        return read_data(config)
    # Each folder that holds classes is a domain; if the path itself holds them, it is the only one.
    matching = [root for root in inside if folders.match_folders(folders.subfolders(root), classes)]
    roots, parent = {root.name: root for root in matching}, path
    if not roots and folders.match_folders(inside, classes):
        roots, parent = {path.resolve().name: path}, path.parent
    if not roots or not roots.keys() >= set(domains):
        raise ConfigError(
            f"config.data.domains={tuple(domains)}, but {path} has {', '.join(roots) or 'none'}: "
            f"give DOMAIN/CLASS/*.jpg, or CLASS/*.jpg of one domain, CLASS of {', '.join(classes)}"
        )
    roots = {domain: roots[domain] for domain in domains or roots}
    listings = [folders.list_classes(name, root, classes) for name, root in roots.items()]
    names = dict.fromkeys(roots, ())
    unpublished = folders.Published("new data", "", names, classes, {}, "", (0.0,), (0.0,))
    size = config.data.image_size
    return folders.folder_source(unpublished, parent, listings, size, **decoding(config))


def _stretched(split: Split, shape: Sequence[int]) -> Split:
    """Returns a split with images, and masks if there are any, of a shape (H, W, C)."""
    labels = split.labels
    if has_masks(labels):
        masks = resized(labels[MASK][..., None], (*shape[:2], 1), nearest=True)
        labels = labels | {MASK: masks[..., 0]}
    return split._replace(images=resized(split.images, shape), labels=labels)


def training_data(config: ConfigDict, trained: ConfigDict, about: Record) -> Experiment:
    """Returns the run's own experiment, with the statistics and the path that `config` names."""
    moved = trained.copy_and_resolve_references()
    moved.statistics = config.statistics
    if config.data.name == trained.data.name:
        moved.data.path, moved.data.cache = config.data.path, config.data.cache
    built = build.build(moved)
    if data_hash(built) != about["data"]:
        place = moved.data.path or moved.data.name
        fault = f"the data in {place} are not those of the run (their hash differs)"
        raise WorkdirError(f"{fault}: give --config.data.path")
    return built


def _served_scores(experiment: Experiment, built: Experiment, state: AnyState) -> Record:
    """Returns adaptation -> accuracy of internal clients by the global model (FedIG, Table 12)."""
    domains = built.internal.domains
    domains = [domains[k] for k in clients_tested(built.evaluation, len(domains))]
    # Clients of one domain share a test split and the global model, so each split is tested once.
    tests = {id(domain.test): Domain(domain.name, None, None, domain.test) for domain in domains}
    served = experiment._replace(unseen=tuple(tests.values()))
    scores, names = unseen_evaluator(served)(state)["unseen"], [d.name for d in domains]
    split_scores = [scores[tests[id(domain.test)].name] for domain in domains]
    return {
        text: by_client(names, [row[text] for row in split_scores], built.plan.clients_named)
        for text in experiment.adaptations
    }


def _plots(
    experiment: Experiment, state: AnyState, tested: Dataset, request: Request
) -> Iterator[tuple[str, _Content]]:
    """Yields (ending of the file's name, content) of the alphas and plots that were requested."""
    variables = on_one_device(served_variables(state), experiment.mesh)
    model = experiment.model
    makers, rule = {"running": adaptation.running}, experiment.method.statistics
    if rule is not None:
        makers = {"as its clients predict": partial(of_clients, statistics=rule)}
    if COLLECTION in variables:
        makers["zero_shot_adapter"] = adaptation.zero_shot_adapter
    for domain in tested.domains:
        title, end, split = f"{tested.name}, {domain.name}", file_name(domain.name), whole(domain)
        samples = model, experiment.prepare, variables, split
        if request.alphas:
            values = alphas_of(*samples)
            yield f"-alphas-{end}.npz", npz_bytes(values)
            yield f"-alphas-{end}.png", partial(plots.alphas, values, title)
        if request.tsne:
            features = {name: features_of(make, *samples) for name, make in makers.items()}
            draw = partial(plots.embeddings, features, split.labels, tested.classes)
            yield f"-tsne-{end}.png", draw
