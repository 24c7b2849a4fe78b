"""The benchmark of programs for a GPU: what is read of them, and its cases; without the plug-in."""

import argparse
from pathlib import Path

import pytest

# A round of three clients (a loop) with four steps each (a loop of them): f32 images [2, 8, 8, 3],
# four filters of 3x3, a dense layer of 256 x 5 in bfloat16. Two steps' batches are in one array.
TEXT = (Path(__file__).parents[1] / "support" / "gpu_program.txt").read_text()
IMAGES, MAPS, FILTERS = 4 * 2 * 8 * 8 * 3, 4 * 2 * 8 * 8 * 4, 4 * 4 * 3 * 3 * 3  # bytes
CONVOLUTION = 2 * (2 * 8 * 8 * 4) * (3 * 3 * 3)
STEP = {  # name: kind, bytes read and written, operations
    "batch": ("other", IMAGES + 4 + IMAGES, 0),
    "conv": ("convolutions, forward", IMAGES + FILTERS + MAPS, CONVOLUTION),
    "head": ("dense products", 2 * (2 * 256 + 256 * 5 + 2 * 5), 2 * 2 * 256 * 5),
    "zero": ("pooling, gradient", MAPS, 0),
    "pool": ("pooling, gradient", 3 * 4 * 32 + 4 * 32 * 4, 0),  # adds 32 numbers to what is there
    "back": ("convolutions, to filters", IMAGES + MAPS + FILTERS, CONVOLUTION),
    "written": ("other", 4 + 4 + 4 + 4, 0),
}


def test_kernels_bytes_and_launches_agree_with_a_sum_by_hand():
    from on_gpu import kernels

    compiled = kernels.read(TEXT)
    assert {k.name: (k.kind, k.size, k.flops) for k in compiled.step} == STEP
    assert compiled.steps == 3 * 4
    assert compiled.of_a_client == 1  # the copy
    assert compiled.launches == 3 * (1 + 4 * len(STEP)) + 1


def test_an_estimate_is_the_longer_of_bytes_and_operations():
    from on_gpu import compiling, kernels

    kernel = kernels.Kernel("dot", "dense products", int(3.35232e12), 0, half=False)
    assert compiling.estimate(kernel) == pytest.approx(1)
    work = kernel._replace(flops=int(0.6 * 2 * 494.7e12))
    assert compiling.estimate(work) == pytest.approx(2)
    assert compiling.estimate(work._replace(half=True, size=0)) == pytest.approx(1)


def test_the_table_and_the_networks_sizes_are_those_that_the_options_choose():
    import gpu_compile
    from on_gpu.cases import MODELS, Case

    def chosen(**options):
        asked = dict.fromkeys(("model", "method", "clients", "dtype")) | {"table": False}
        return gpu_compile.cases(argparse.Namespace(**asked | options))

    assert chosen() == [Case("ResNet18", "fedbn", "map", "bfloat16")]
    assert len(chosen(method=["fedbn", "fedavg"], dtype=["bfloat16", "float32"])) == 4
    assert {case.model for case in chosen(table=True, dtype=["float32"])} < MODELS.keys()
