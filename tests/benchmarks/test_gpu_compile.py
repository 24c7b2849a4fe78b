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
    assert {k.name: (k.kind, k.read + k.written, k.flops) for k in compiled.step} == STEP
    assert compiled.steps == 3 * 4
    assert compiled.of_a_client == 1  # the copy
    assert compiled.launches == 3 * (1 + 4 * len(STEP)) + 1  # and of two branches the longer
    assert compiled.outside == 3 + 1
    head = next(kernel for kernel in compiled.step if kernel.name == "head")
    assert head.seconds(1e12, (1e9, 1e3), share=0.5) == pytest.approx(2 * 2 * 256 * 5 / 0.5e9)


def test_the_table_and_the_networks_sizes_are_those_that_the_options_choose():
    import gpu_compile
    from on_gpu.cases import MODELS, Case

    def chosen(**options):
        asked = dict.fromkeys(("model", "method", "clients", "dtype")) | {"table": False}
        return gpu_compile.cases(argparse.Namespace(**asked | options))

    assert chosen() == [Case("ResNet18", "fedbn", "map", "bfloat16")]
    assert len(chosen(method=["fedbn", "fedavg"], dtype=["mixed", "float32"])) == 4
    assert {case.model for case in chosen(table=True, dtype=["float32"])} < MODELS.keys()
    with pytest.raises(SystemExit):
        chosen(table=True, method=["fedavg"])
