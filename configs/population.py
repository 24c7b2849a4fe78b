"""10,000 clients, 64 of which train a round; no download.

    python -m fedjax_bn.main --config configs/population.py

Five of the embedded scanners have 2,000 clients each, and the sixth is the unseen one. A client has
16 samples, drawn from the 180 of its scanner with replacement, so that clients share samples: the
data are small, and what is shown is a large population, not a result of a paper.

The clients' own parts (batch norm with FedBN) are kept in the host's memory and those of a round's
64 on the device, see `population` in `fedjax-bn list keys`. A tenth of the drawn clients drop out.
100 of all clients are evaluated, always the same ones; metrics, tables and plots show quantiles and
means by scanner.

    who is available when, from a file   --config.participation=uniform:trace=FILE
    chances by the clients' samples      --config.participation=by_size
    all clients evaluated, in blocks     --config.eval_clients=0
    rows on the device, as of few        --config.population=device

Small: --config.data.num_clients=200 --config.clients_per_round=16 --config.rounds=60
--config.population=host
The clients' own accuracy stays low: one that has trained five times, a step each, has running
statistics that are still mostly those of the start.
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.model = "DigitCNN"
    config.rounds = 50
    config.clients_per_round = 64
    config.population = "auto"
    config.participation = "uniform:dropout=0.1"
    config.eval_clients = 100
    config.clients_named = 50
    config.eval_every = 10
    config.checkpoint_every = 10
    config.data.name = "scanners"
    config.data.num_clients = 10_000
    config.data.partition = "drawn:samples=16"
    config.target = "fax"
    config.adaptations = ("running", "batch", "tsmobn")
    return override(config, changes)
