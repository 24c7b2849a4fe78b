"""Every config file is read, checked and documented; those with real data here are built."""

import jax
import numpy as np
import pytest

import runs
from fedjax_bn.arguments.errors import ConfigError
from fedjax_bn.data.sets.scanners import load_scanners
from fedjax_bn.run import train
from fedjax_bn.run.config import override
from fedjax_bn.run.config.file import read
from fedjax_bn.run.experiment.build import build
from fedjax_bn.sharing import path_names
from fedjax_bn.training.start import make_keys, make_start

WITHOUT_DATA = ("cow_on_beach", "population", "quickstart", "segmentation", "signs", "synthetic")
CONFIGS = sorted((runs.ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.stem == "signs"), id=p.stem) for p in CONFIGS],
)
def test_a_config_names_its_command_and_is_built_or_says_which_data_belong_there(path):
    config = read(str(path))
    docstring = path.read_text().split('"""')[1]
    assert f"python -m fedjax_bn.main --config configs/{path.name}" in docstring
    if path.stem in WITHOUT_DATA:
        assert build(config).internal.domains
        return
    with pytest.raises(ConfigError) as error:
        build(config)
    assert "--config.data.path=PATH; " in str(error.value)
    assert len(str(error.value)) > 150  # more than that it is missing


@pytest.mark.parametrize(("name", "seed"), [("scanners:seed=0", 0), ("scanners", 2)])
def test_embedded_data_are_of_the_runs_seed_or_of_a_given_one(name, seed):
    config = read("quickstart", [("seed", "2"), ("data.name", name)])
    images = build(config).internal.domains[0].train.images
    np.testing.assert_array_equal(images, load_scanners(seed).domains[0].train.images)


@pytest.fixture(scope="module")
def small_pacs(shared, tmp_path_factory):
    """Changes that read PACS at eight pixels, which is decoded once."""
    cache = str(tmp_path_factory.mktemp("cache"))
    return {"data.path": f"{shared}/data/pacs", "data.cache": cache, "data.image_size": "8"}


@pytest.mark.slow
def test_the_cross_silo_setting_of_fedig_is_a_config(small_pacs):
    """A.6: 30 clients of three domains, iid or Dirichlet."""
    changes = [*small_pacs.items(), ("data.partition", "dirichlet")]
    experiment = build(read("configs/pacs_30_clients.py", changes))
    clients = [domain.name for domain in experiment.internal.domains]
    assert len(clients) == 30
    assert sum(name.startswith("photo/") for name in clients) == 10
    own = [domain for domain in experiment.internal.domains if domain.name.startswith("photo/")]
    assert {len(domain.validation.labels) for domain in own} == {1670 // 5}
    assert min(len(domain.train.labels) for domain in experiment.internal.domains) >= 10
    assert "dirichlet:smallest=1" in (runs.ROOT / "configs/pacs_30_clients.py").read_text()


PACS = "batch_size=64,local_steps=200,local_epochs=1,optimizer.learning_rate=0.01"
FEDCD = "local_steps=0,local_epochs=5,optimizer.learning_rate=0.001,data.validation=0.1"
ADAM = "optimizer.name=adam,optimizer.learning_rate=0.0001,data.truncate=None"
ELCFS = "rounds=100,batch_size=5,data.image_size=384,optimizer.learning_rate=0.001,target=UCL"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("pacs.py", f"{PACS},data.validation=0.2,validate_with=global"),
        ("pacs.py:protocol=fedcd", f"{FEDCD},batch_size=16,validate_with=own"),
        ("pacs.py:rounds=3,protocol=fedcd,batch_size=8", f"{FEDCD},rounds=3,batch_size=8"),
        ("patients", f"{ADAM},rounds=200,batch_size=8,data.image_size=384,data.protocol="),
        ("harmofl", f"{ADAM},rounds=500,batch_size=16,data.truncate=True,weigh=uniform"),
        ("fl_medsegbench", f"{ADAM},rounds=400,batch_size=8,data.image_size=256"),
        ("feddg", f"{ELCFS},optimizer.name=adam,data.truncate=None,weigh=,data.protocol="),
    ],
)
def test_pacs_and_prostate_have_the_protocols_of_papers_and_codes(config, expected):
    """fed_train.py of HarmoFL, scripts/ of FL-MedSegBench, train_ELCFS.py of FedDG."""
    source = f"configs/{config}" if ".py" in config else f"configs/prostate.py:protocol={config}"
    assert override(read(source), expected) == read(source)


def test_the_small_recipe_of_pacs_trains_the_last_block_and_the_classifier(tmp_path):
    arrays = {}
    for domain in ("photo", "sketch"):
        maps = np.random.default_rng(0).normal(size=(14, 3, 3, 2048)).astype(np.float16)
        arrays |= {f"{domain}__images": maps, f"{domain}__labels": np.arange(14) % 7}
    np.savez(tmp_path / "maps.npz", **arrays)
    config = read("configs/pacs.py:protocol=small,method=fedavg,adaptations=running")
    config.data.path, config.data.validation = str(tmp_path / "maps.npz"), 0.2
    shapes = jax.eval_shape(make_start(build(config), make_keys(0)))
    paths = [path_names(path) for path, _ in jax.tree.leaves_with_path(shapes.shared)]
    assert {path[1] for path in paths} == {"head", "layer4_2"}


def test_a_protocol_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match=r"config\.protocol='fedcd2'"):
        read("configs/pacs.py:protocol=fedcd2,method=fedcd")


def test_a_baseline_that_shares_nothing_is_not_tested_on_unseen_clients(tmp_path):
    configs = train.runs(read("quickstart", [("baselines", "singleset,fedavg")]), tmp_path)
    assert [len(config.adaptations) for config, _ in configs] == [2, 0, 2]
