"""How much code a reader follows from a round to the model, in which order."""

import re
import traceback
from pathlib import Path

import flax.linen as nn
import jax
import optax
import pytest

import fedjax_bn
from federations import OneNorm, batches_of, variables_of
from fedjax_bn.methods import fedbn

ROOT = Path(fedjax_bn.__file__).parent


class Reached(Exception):
    """Training reached the model; nothing is compiled."""


class Stopping(OneNorm):
    """A network that stops where it is first called in training."""

    @nn.compact
    def __call__(self, x, train=False):
        if train:
            raise Reached(
                [f for f in traceback.extract_stack() if ROOT in Path(f.filename).parents]
            )
        return super().__call__(x)


def test_a_step_of_fedbn_is_16_frames_in_8_files_from_the_round_to_the_model():
    method = fedbn(Stopping(), optax.sgd(0.1))
    state = method.init(jax.random.key(0), variables_of(OneNorm()), 2)
    with pytest.raises(Reached) as reached:
        method.round(state, batches_of((9, 4)), jax.random.key(1))
    frames = reached.value.args[0]
    files = {frame.filename for frame in frames}
    names = [f"{Path(f.filename).relative_to(ROOT)}:{f.lineno} {f.name}" for f in frames]
    assert len(frames) <= 16, names
    assert len(files) <= 8, files
    # The reading order of README and CONTRIBUTING is the one in which a round passes its files.
    passed = dict.fromkeys(f"{Path(f.filename).relative_to(ROOT)}" for f in frames)
    for page in ("README.md", "CONTRIBUTING.md"):
        named = re.findall(r"`([a-z_/]+\.py)`", (ROOT.parent / page).read_text())
        order = [name for name in dict.fromkeys(named) if name in passed]
        assert order[: len(passed) - 1] == [*passed][:-1], (page, order)
    assert names[-1].startswith("normalization/calls.py"), names  # all the way to the model
