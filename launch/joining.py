"""Lets a client of another domain join a finished federation (FedBN, Appendix G).

    python launch/joining.py --workdir RUN [--client NAME] [--epochs 20] [--name joined] [--trust]

The client receives the federation's model and trains only batch norm, on its own training images:
"This new center will compute its own mean and variance statistics, and learn the corresponding
local BN parameters." All other leaves stay as received. RUN left the client out (target=NAME); its
data are read from the run's data path. Writes RUN/evaluations/joined.json: the accuracy on the
client's test images before ("received", with the clients' mean batch norm) and after ("joined").

Decisions where the paper is silent: batch norm starts from the clients' mean; the optimizer, the
batch size and the learning rate are those of the run; there is no augmentation.
"""

import argparse
import sys
from pathlib import Path

import jax
import optax
from ml_collections import ConfigDict

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from fedjax_bn import methods, sharing  # noqa: E402
from fedjax_bn.arguments.errors import ConfigError, UserError  # noqa: E402
from fedjax_bn.data.domain import Domain  # noqa: E402
from fedjax_bn.federation import FederatedState, global_variables  # noqa: E402
from fedjax_bn.run.config.choices import optimizer_of  # noqa: E402
from fedjax_bn.run.experiment.build import Experiment, read_values  # noqa: E402
from fedjax_bn.run.experiment.datasets import configured_clients, read_data  # noqa: E402
from fedjax_bn.run.experiment.method import OPTIMIZERS  # noqa: E402
from fedjax_bn.run.files import finished_run  # noqa: E402
from fedjax_bn.run.files.finished_run import recorded_code  # noqa: E402
from fedjax_bn.training import workdir  # noqa: E402
from fedjax_bn.training.evaluation.evaluate import internal_evaluator  # noqa: E402
from fedjax_bn.training.rounds import open_rounds  # noqa: E402
from fedjax_bn.training.start import make_keys  # noqa: E402


def batch_norm_only(
    optimizer: optax.GradientTransformation, variables: sharing.Variables
) -> optax.GradientTransformation:
    """Returns an optimizer that updates only the scales and biases of batch norms.

    Raises:
      ValueError: the model has no batch norm.
    """
    stays = sharing.all_but_batch_norm(variables)
    labels = jax.tree.map(lambda kept: "stays" if kept else "learns", {"params": stays["params"]})
    return optax.multi_transform({"learns": optimizer, "stays": optax.set_to_zero()}, labels)


def join(
    config: ConfigDict, experiment: Experiment, variables: sharing.Variables, client: Domain
) -> tuple[FederatedState, dict[str, float]]:
    """Trains batch norm on a client for `config.rounds` epochs.

    Args:
      config: the run's configuration, with the rounds, local epochs and seed of this training.
      experiment: the run's model and preprocessing.
      variables: the collections that the client receives.
      client: the client's training and test samples.

    Returns:
      The client's state, and {"received": percent, "joined": percent}, its accuracy before and
      after.
    """
    (name, clip), rate = optimizer_of(config), config.optimizer.learning_rate
    optimizer = batch_norm_only(OPTIMIZERS[name](config.optimizer, rate), variables)
    if clip:
        optimizer = optax.chain(optax.clip_by_global_norm(clip), optimizer)
    method = methods.singleset(experiment.model, optimizer, prepare=experiment.prepare)
    internal = experiment.internal._replace(domains=(client,))
    # `mesh=None`: a single client cannot be divided among devices
    alone = experiment._replace(method=method, internal=internal, unseen=(), mesh=None)
    alone = alone._replace(**read_values(config, method, 1))
    keys = make_keys(config.seed)
    state = method.init(keys.method, variables, 1)
    evaluate = internal_evaluator(alone)
    accuracy = {"received": evaluate(state)["accuracy"]["mean"]}
    round = open_rounds(alone, keys, state).compile(state)
    for _ in range(config.rounds):
        state, _ = round(state)
    return state, accuracy | {"joined": evaluate(state)["accuracy"]["mean"]}


def find_client(config: ConfigDict, name: str) -> Domain:
    """Returns the client that a run left out, with its training samples.

    Raises:
      ConfigError: the run's data have no such client, or no training samples of it.
    """
    whole = config.copy_and_resolve_references()
    whole.target = ""  # without a target, all domains are read with their training samples
    known = configured_clients(read_data(whole), whole)[0].domains
    chosen = [domain for domain in known if domain.name == name]
    if not chosen or chosen[0].train is None:
        names = ", ".join(domain.name for domain in known if domain.train is not None)
        raise ConfigError(f"--client={name} has no training samples in the run's data: {names} do")
    return chosen[0]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="A client joins a finished federation.")
    parser.add_argument("--workdir", type=Path, required=True, help="of the finished run")
    parser.add_argument("--client", default="", help="which; by default the one it left out")
    parser.add_argument("--epochs", type=int, default=20, help="that the client trains")
    parser.add_argument("--name", default="joined", help="of the file in evaluations/")
    parser.add_argument("--trust", action="store_true", help="import code that the run names")
    options = parser.parse_args(arguments)
    try:
        about = finished_run.read_about(options.workdir)
        own = finished_run.remembered(about, options.trust)
        client = find_client(own, options.client or own.target)
        with recorded_code(options.workdir, about, trust=options.trust):
            own.mesh.update(clients=1, batch=0)  # a single client trains
            experiment, state, _ = finished_run.restore(options.workdir, own, about["form"])
        alone = own.copy_and_resolve_references()
        alone.update(rounds=options.epochs, local_epochs=1, local_steps=0, clients_per_round=0)
        # What else of the run concerns several clients, or steps that this client does not make.
        alone.update(client_epochs=(), local_selection=0, weigh="")
        alone.participation = "uniform"
        _, accuracy = join(alone, experiment, global_variables(state), client)
    except (UserError, ValueError, OSError) as error:
        print(f"joining: {error}", file=sys.stderr)
        return 2
    path = options.workdir / "evaluations" / f"{options.name}.json"
    result = {"client": client.name, "epochs": options.epochs, "seed": own.seed}
    workdir.write_json(path, result | {"unseen": {client.name: accuracy}, "internal": {}})
    print(", ".join(f"{way} {percent:.2f} %" for way, percent in accuracy.items()), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
