"""`config.cpu_kernels=measured` over Flower: each client measures its own CPU."""

import json
import logging

import flax.linen as nn
import jax
import pytest

import runs
from fedjax_bn.models.layers import conv_of
from fedjax_bn.normalization import BatchNorm

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedjax_bn[flower]'")

from fedjax_bn.flower import client_app
from fedjax_bn.flower.server import serve
from fedjax_bn.flower.settings import run_of
from fedjax_bn.run import kernels as run_kernels
from flower_apps import CONFIG, QUIET, run_config
from flower_grid import LocalGrid, node

CHANGES = "cpu_kernels=measured,data.image_size=3"


class OneConv(nn.Module):
    """A convolution, its batch norm, and a classifier."""

    num_classes: int = 3

    @nn.compact
    def __call__(self, x):
        x = conv_of("batch", kernel=3, padding=1)(x, 2, name="conv")
        return nn.Dense(self.num_classes)(BatchNorm(name="norm")(x).mean((1, 2)))


def as_maps(split):
    """The same samples as images of 3x2."""
    return split._replace(images=split.images.reshape(-1, 3, 2, 1))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An app's folder whose one client trains a convolution, on a CPU where taps are fastest."""
    (ant, *others) = runs.DATA.domains
    ant = ant._replace(train=as_maps(ant.train), validation=None, test=as_maps(ant.test))
    others = [one._replace(train=None, validation=None, test=as_maps(one.test)) for one in others]
    runs.install(monkeypatch, runs.DATA._replace(domains=(ant, *others)))
    text = CONFIG.replace("double_net:DoubleNet", "test_flower_kernels:OneConv")
    (tmp_path / "config.py").write_text(text.replace('"cow,dog"', '"bee,cow,dog"'))
    measured = {"patches": [2.0] * 5, "taps": [1.0] * 5}
    monkeypatch.setattr(run_kernels, "measured", lambda shapes: measured)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "compiled"))
    with jax.numpy_dtype_promotion("standard"):
        yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_client_trains_with_what_it_measured_recorded_in_its_folder_and_compiles_once(
    folder, caplog
):
    config = run_config(folder / "server", CHANGES) | {"clients": 1}
    place = folder / "client-0"
    answers = node(client_app(folder), config, client=0, folder=str(place), report=QUIET)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        serve(LocalGrid({10: answers}), run_of(config), folder)
    (record,) = place.glob("*/kernels.json")
    assert {*json.loads(record.read_text()).values()} == {"taps"}
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]
    assert sum("resident" in one for one in compiled) == 1  # for two rounds
