"""What `evaluate` makes of a finished run, by the command and by the functions below it."""

import re
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import norm_nets as nets
import runs
from fedjax_bn import adaptation, main
from fedjax_bn.adaptation.choice import choose_adaptation
from fedjax_bn.arguments.errors import CheckpointError
from fedjax_bn.data.domain import Domain, Split
from fedjax_bn.engine.images import standardize
from fedjax_bn.federation import global_variables
from fedjax_bn.methods import fedbn
from fedjax_bn.normalization.adapter import with_adapter
from fedjax_bn.run import evaluate as evaluate_finished
from fedjax_bn.run.evaluate import Request
from fedjax_bn.run.experiment import build as experiment
from fedjax_bn.run.experiment.build import read_evaluation
from fedjax_bn.run.experiment.model import MODELS
from fedjax_bn.run.files.finished_run import restore_state
from fedjax_bn.task import classification
from fedjax_bn.training import checkpoint, plots, workdir
from fedjax_bn.training.evaluation.evaluate import unseen_evaluator
from fedjax_bn.training.plots import alphas_of, features_of
from small_images import dataset_of_images

# The clients have no test samples, and are tested on those that validate.
DATA = dataset_of_images(runs.NAMES)
UNTESTED = (domain._replace(test=domain.validation) for domain in DATA.domains[:3])
DATA = DATA._replace(domains=(*UNTESTED, DATA.domains[3]))
OTHER = dataset_of_images(("elk",))


class Small(nn.Module):
    """A batch norm that sees maps; compiles soon."""

    num_classes: int = 3

    @nn.compact
    def __call__(self, images):
        x = nets.Block(8, name="first")(images)
        return nn.Dense(self.num_classes, name="out")(x.mean((1, 2)))


def changed(data):
    """The dataset with another label of one training sample, all else the same."""
    ant, *others = data.domains
    labels = ant.train.labels.copy()
    labels[0] = (labels[0] + 1) % 3
    ant = ant._replace(train=ant.train._replace(labels=labels))
    return data._replace(domains=(ant, *others))


def load(config):
    data = {"none": DATA, "other": OTHER, "six": runs.DATA, "changed": changed(DATA)}
    return data[config.data.path]


@pytest.fixture(scope="module", autouse=True)
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch, DATA)
        patch.setitem(experiment.DATASETS, "tiny", load)
        patch.setitem(MODELS, "Small", Small)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of FedIG-A, its summary, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("evaluation") / "run", []
    keys = {"model": "Small", "data__image_size": 8, "rounds": 2, "batch_size": 6}
    keys |= {"method": "fediga", "adaptations": ("running", "zero_shot_adapter")}
    config = runs.config(**keys, adapt_batch_size=8)
    summary = runs.train.run(config, folder, say=printed.append)
    return folder, summary, printed


def run(folder, *changes, **options):
    request = Request(changes=tuple(changes), **options)
    return evaluate_finished.run(folder, request, say=lambda text: None)


def test_the_same_domain_gives_the_numbers_of_training(finished):
    folder, summary, _ = finished
    result, _ = run(folder)
    assert result["round"] == summary["selected_round"]
    assert result["unseen"] == summary["accuracy"]["unseen"]
    assert result["samples"] == {"dog": 26}


def test_a_new_domain_is_tested_without_the_training_data(finished, monkeypatch):
    """All domains of other data are tested, with adaptations that the run never named."""

    def only_new(config):
        assert config.data.path == "other"
        return OTHER

    monkeypatch.setitem(experiment.DATASETS, "tiny", only_new)
    choices = "batch,fixed_alpha:alpha=1,ensemble,zero_shot_adapter"
    before = runs.files(finished[0])
    changes = [("data.path", "other"), ("target", ""), ("adaptations", choices)]
    result, files = run(finished[0], *changes, name="elk")
    assert [*result["unseen"]] == ["elk"]
    assert [*result["unseen"]["elk"]] == choices.split(",")
    assert files == [finished[0] / "evaluations" / "elk.json"]
    assert workdir.read_json(files[0])["unseen"] == result["unseen"]
    after = runs.files(finished[0])
    assert after.keys() - before.keys() == {"evaluations/elk.json"}
    assert all(after[name] == content for name, content in before.items())


def test_internal_clients_are_tested_with_local_and_global_statistics(finished):
    """They have no test samples: validation samples test them, which a note says."""
    folder, summary, printed = finished
    said, note = [], experiment.TESTED_ON_VALIDATION
    result, _ = evaluate_finished.run(folder, Request(internal=True), say=said.append)
    assert list(result["internal"]) == ["own", "running", "zero_shot_adapter"]
    assert result["internal"]["own"] == pytest.approx(summary["accuracy"]["internal"])
    assert result["notes"] == [note]
    assert note in said
    assert note in printed
    assert "notes" not in run(folder, name="unseen")[0]


def test_a_run_with_a_trace_is_tested_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "trace").write_text("all\n")
    monkeypatch.chdir(tmp_path)
    folder, keys = tmp_path / "run", {"model": "Small", "data__image_size": 8, "rounds": 1}
    runs.run(folder, method="fedavg", participation="uniform:trace=trace", **keys)
    monkeypatch.chdir(folder)
    assert list(run(folder, internal=True)[0]["internal"]) == ["own", "running"]


@pytest.mark.slow
def test_alphas_and_features_are_recorded_and_plotted_on_request(finished):
    _, files = run(finished[0], alphas=True, tsne=True, name="plots")
    assert {file.name for file in files} == {
        *("plots.json", "plots-alphas-dog.npz", "plots-alphas-dog.png", "plots-tsne-dog.png")
    }
    with np.load(finished[0] / "evaluations" / "plots-alphas-dog.npz") as alphas:
        assert alphas["first/inner"].shape == (26,)


def test_the_command_prints_a_table_and_what_it_wrote(finished, capsys):
    arguments = ("--workdir", str(finished[0]), "--config.adaptations=running,batch")
    assert runs.command("evaluate", *arguments, "--internal") == 0
    text = capsys.readouterr().out
    assert "unseen, accuracy %   dog\n" in text
    assert "internal, validation accuracy %   ant   bee   cow  mean" in text
    for start in ("unseen, dog", r"internal, own \(validation\)"):
        heads = "loss balanced_accuracy auc auc_interval ece counts".replace(" ", " +")
        assert re.search(rf"{start} +{heads}\n", text)
    assert str(finished[0] / "evaluations" / "evaluation.json") in text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("--config.adaptations=learned_alpha", "learned gates need method=fedig"),
        ("--config.target=doog", "target 'doog'"),
        ("--config.target=", "left no domain out"),
        ("--config.data.path=six --config.target=", "shape [8, 8, 3] (uint8) in 3 classes"),
        ("--config.data.name=folder", "config.data.name='folder' is unknown; did you mean"),
        ("--config.data.path=changed --internal", "not those of the run (their hash differs)"),
    ],
)
def test_a_mistake_is_one_sentence(finished, capfd, arguments, part):
    before = runs.files(finished[0])
    assert runs.command("evaluate", "--workdir", str(finished[0]), *arguments.split()) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert part in line
    assert runs.files(finished[0]) == before


def test_a_workdir_without_a_finished_run_is_an_error(finished, tmp_path, capfd):
    (tmp_path / "config.json").write_bytes((finished[0] / "config.json").read_bytes())
    assert runs.command("evaluate", "--workdir", str(tmp_path)) == 2
    assert "summary.json" in capfd.readouterr().err


def test_each_target_is_left_out_in_turn_by_one_command(tmp_path, monkeypatch, capsys):
    made = []

    def train(config, folder, modules):
        """What a run leaves, without training."""
        made.append((folder.relative_to(tmp_path).as_posix(), config.method, config.target))
        scores = {text: float(len(made)) for text in config.adaptations}
        accuracy = {"internal": {"mean": 1.0}, "unseen": {config.target: scores}}
        return {"method": config.method, "accuracy": accuracy}

    keys = {"data__path": "none", "baselines": ("fedavg",), "method": "fediga"}
    keys |= {"target": "each", "adaptations": ("running", "zero_shot_adapter")}
    monkeypatch.setattr(main, "read", lambda source, changes: runs.config(**keys))
    monkeypatch.setattr("fedjax_bn.run.train.run", train)
    monkeypatch.setattr("fedjax_bn.report.page.write_report", lambda folder: None)
    assert runs.command("--config", "tiny.py", "--workdir", str(tmp_path)) == 0
    assert made[::2] == [(name, "fediga", name) for name in runs.NAMES]
    assert made[1::2] == [(f"{name}/baselines/fedavg", "fedavg", name) for name in runs.NAMES]
    content = workdir.read_json(tmp_path / "targets.json")
    assert content["targets"] == list(runs.NAMES)
    rows = {(row["method"], row["adaptation"]): row for row in content["accuracy"]}
    # A baseline is tested with what it can do.
    fediga = {("fediga", "running"), ("fediga", "zero_shot_adapter")}
    assert set(rows) == fediga | {("fedavg", "running")}
    assert [rows["fedavg", "running"][name] for name in runs.NAMES] == [2, 4, 6, 8]
    assert rows["fedavg", "running"]["mean"] == 5
    assert "fediga [zero_shot_adapter]" in capsys.readouterr().out


def test_every_ablation_has_its_plot():
    row = {"running": 50.0, "tsmobn": 60.0, "tsmobn:affine=False": 55.0}
    row |= {f"batch:batch_size={n}": float(n) for n in (2, 4, 8)}
    row |= {f"tsmobn:order={n}": 60.0 + n for n in range(4)}
    drawn = {name: draw() for name, draw in plots.ablations({"fax": row, "dog": row})}
    names = {"-batch-batch_size.png", "-tsmobn-affine.png", "-tsmobn-order.png"}
    assert set(drawn) == names
    assert all(picture.startswith(b"\x89PNG") for picture in drawn.values())
    assert dict(plots.ablations({})) == {}


class OneBlock(nn.Module):
    """One batch norm, since each adaptation takes longer to compile than to run."""

    @nn.compact
    def __call__(self, images):
        return nn.Dense(nets.CLASSES, name="out")(nets.Block(4, name="block")(images).mean((1, 2)))


MODEL = OneBlock()
PREPARE = standardize()


def split(count=11, seed=0):
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 6, 6, 3)).astype(np.uint8)
    return Split(images, random.integers(0, nets.CLASSES, count).astype(np.int32))


@pytest.fixture(scope="module")
def state():
    images = jnp.zeros((2, 6, 6, 3), jnp.float32)
    variables = with_adapter(jax.random.key(1), MODEL, nets.variables_of(MODEL, images), images)
    start = jax.jit(fedbn(MODEL, optax.sgd(0.1)).init, static_argnums=2)
    state = start(jax.random.key(0), variables, 3)
    factor = jnp.asarray([0.7, 1.0, 1.6])
    spread = lambda leaf: leaf * factor.reshape(3, *(1,) * (leaf.ndim - 1))  # noqa: E731
    return state._replace(personal=jax.tree.map(spread, state.personal))


def score_adaptations(state, data, texts, batch_size=32):
    """Adaptation -> accuracy in percent of one unseen client."""
    experiment = SimpleNamespace(
        model=MODEL,
        method=fedbn(MODEL, optax.sgd(0.1)),
        prepare=PREPARE,
        unseen=(Domain("fax", None, None, data),),
        adaptations={text: choose_adaptation(text, MODEL, batch_size) for text in texts},
        mesh=None,
        task=classification(),
        evaluation=read_evaluation(runs.config(), fedbn(MODEL, optax.sgd(0.1))),
        plan=SimpleNamespace(device_megabytes=4000),
    )
    return unseen_evaluator(experiment)(state)["unseen"]["fax"]


def percent(logits, labels):
    return 100 * np.mean(np.asarray(logits).argmax(-1) == labels)


def test_every_choice_is_streamed_in_its_own_order_and_batches(state):
    data, variables = split(), global_variables(state)
    texts = ["running", "tsmobn:momentum=0.5:batch_size=4:order=2", "batch:batch_size=5:order=-1"]
    ours = score_adaptations(state, data, texts)
    pixels = PREPARE(jnp.asarray(data.images), jnp.float32)
    expected = {"running": percent(jax.jit(MODEL.apply)(variables, pixels), data.labels)}
    for text, adapt, size, order in (
        (texts[1], adaptation.tsmobn(MODEL, 0.5), 4, np.random.default_rng(2).permutation(11)),
        (texts[2], adaptation.batch(MODEL), 5, np.arange(11)),
    ):
        carry, logits, predict = adapt.init(variables), [], jax.jit(adapt.predict)
        for start in range(0, 11, size):
            out, carry = predict(variables, carry, pixels[order[start : start + size]])
            logits.append(out)
        expected[text] = percent(np.concatenate(logits), data.labels[order])
    assert ours == pytest.approx(expected)


def test_alphas_and_features_cover_all_samples_in_order(state):
    data, variables = split(), global_variables(state)
    pixels = PREPARE(jnp.asarray(data.images), jnp.float32)
    alphas = alphas_of(MODEL, PREPARE, variables, data, batch_size=4)
    for name, values in jax.jit(adaptation.record_alphas(MODEL))(variables, pixels).items():
        np.testing.assert_allclose(alphas[name], values, rtol=1e-5)
    for make in (adaptation.running, adaptation.zero_shot_adapter):
        features = features_of(make, MODEL, PREPARE, variables, data, batch_size=4)
        out = variables["params"]["out"]
        logits, _ = jax.jit(make(MODEL).predict)(variables, (), pixels)
        np.testing.assert_allclose(
            features @ out["kernel"] + out["bias"], logits, rtol=1e-3, atol=1e-4
        )


def test_the_selected_checkpoint_is_taken_before_the_latest(state, tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        restore_state(tmp_path, state)
    for name, round in (("latest", 9), ("selected", 4)):
        with checkpoint.open_folder(tmp_path / "checkpoints" / name, keep=2) as manager:
            checkpoint.save(manager, round, state._replace(round=jnp.asarray(round, jnp.int32)))
        found, number = restore_state(tmp_path, jax.eval_shape(lambda: state))
        assert number == int(found.round) == round
