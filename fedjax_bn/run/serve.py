"""The command `serve`: writes what an unseen client receives from a finished run."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax

from fedjax_bn import __version__
from fedjax_bn.adaptation import ensemble
from fedjax_bn.adaptation.choice import ADAPTATIONS, choose_adaptation
from fedjax_bn.arguments.choices import split_choice
from fedjax_bn.arguments.errors import ConfigError, as_config_errors
from fedjax_bn.arguments.text import brief
from fedjax_bn.federation import FederatedState
from fedjax_bn.run.config.keys import assign, check
from fedjax_bn.run.config.trust import recorded_code
from fedjax_bn.run.experiment.datasets import slices_in
from fedjax_bn.run.experiment.method import check_adaptations
from fedjax_bn.run.files import finished
from fedjax_bn.serving import folder as served
from fedjax_bn.serving.program import export
from fedjax_bn.training.evaluation.evaluate import served_variables
from fedjax_bn.training.experiment import Experiment
from fedjax_bn.training.population import Held


def run(
    folder: Path,
    to: Path,
    changes: Sequence[tuple[str, str]] = (),
    say: Callable[[str], None] = print,
    trust: bool = False,
) -> None:
    """Writes what an unseen client receives: the selected round's model, and how to use it.

    Args:
      folder: the run's workdir.
      to: the folder that is written.
      changes: (key, text) pairs; the only key allowed is `adaptations`, those to serve.
      say: prints a message.
      trust: whether to import code that the run's folder names.

    Raises:
      WorkdirError, CheckpointError: the workdir holds no finished run, or a damaged one.
      ConfigError: an adaptation does not suit the run, or the folder cannot be written.
    """
    about = finished.read_about(folder)
    own = finished.remembered(about, trust)
    config = own.copy_and_resolve_references()
    for key, text in changes:
        if key != "adaptations":
            raise ConfigError(
                f"config.{key} is the run's own and served as it is: of all keys, `serve` takes "
                "adaptations alone"
            )
        assign(config, key, text)
    names = {text: split_choice(text, ADAPTATIONS)[0] for text in config.adaptations}
    kept = [text for text, name in names.items() if name != ensemble.__name__]
    if changes and len(kept) < len(names):
        raise ConfigError(
            "config.adaptations has ensemble, which needs the batch norms of every client, and "
            "those do not leave: choose other adaptations"
        )
    config.adaptations = tuple(kept) or ("running",)
    check(config)
    check_adaptations(own, config.adaptations)
    own.adaptations = ()  # those of `config` are built below
    with recorded_code(folder, about, dict(changes).values(), trust), as_config_errors():
        experiment, state, number = finished.restore(folder, own, about["form"])
        for note in _notes(experiment, state, private=config.privacy.clip > 0):
            say(note)
        internal, form = experiment.internal, about["form"]
        facts = served.About(
            form=served.FORM,
            library=__version__,
            model=config.model,
            compute_dtype=config.compute_dtype,
            method=config.method,
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
            facts = facts._replace(
                **{"channels": slices.channels, "crop": slices.crop},
                **{"plane": slices.plane, "window": list(slices.window)},
            )
        variables, shape, programs = served_variables(state), tuple(facts.shape), {}
        for text in config.adaptations:
            choice = choose_adaptation(text, experiment.model, config.adapt_batch_size)
            try:
                programs[text] = export(choice, variables, experiment.prepare, shape, facts.dtype)
            except ImportError as error:  # flatbuffers is not installed
                if not served.is_ours(config.model):
                    raise ConfigError(
                        f"config.model={brief(config.model)} is your own, served as a program: "
                        f"{error}"
                    ) from error
                say(f"served without programs: {error}")
                programs = {}
                break
        served.write(to, facts, variables, programs)
    say(f"round {number} of {own.method} in {folder} is served in {to}")
    used = ("--model", str(to), "--data", "IMAGES", "--adapt", config.adaptations[0])
    out = ("--out", "FOLDER") if experiment.task.segments else ()
    say(shlex.join(("fedjax-bn", "predict", *used, *out)))


def _notes(experiment: Experiment, state: FederatedState | Held, private: bool) -> Iterator[str]:
    """Yields what the user should know about the model; raises ConfigError for a detector."""
    if not (experiment.task.classifies or experiment.task.segments):
        raise ConfigError(
            "serve writes a model whose outputs are probabilities of classes, and this run has a "
            "detector: use fedjax_bn.tasks.detection in Python"
        )
    if experiment.evaluation.personalization:
        yield (
            "evaluate lets unseen clients adapt to labelled samples first (personalize_samples); "
            "the served model is the one before that"
        )
    personal = (state.state if isinstance(state, Held) else state).personal
    if private and (own := len(jax.tree.leaves(personal))):
        yield (
            f"the clients' mean of {own} personal leaves is served without noise: the run's "
            "epsilon does not cover it, see docs/privacy.md"
        )
