"""How many samples a round draws, and whose are repeated."""

from ml_collections import ConfigDict

from fedjax_bn.data.domain import Dataset
from fedjax_bn.data.messages import first_few
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.experiment.method import local_epochs

_MOST_DRAWS = 2**28  # 2 GB of numbers


def repetition_notes(internal: Dataset, config: ConfigDict) -> tuple[str, ...]:
    """A sentence on the clients that have fewer samples than the full batches of their steps."""
    sizes = {domain.name: len(domain.train.images) for domain in internal.domains}
    few = [f"{name} ({size})" for name, size in sizes.items() if size < config.batch_size]
    if not config.local_steps or not few:
        return ()
    return (
        f"a step's batch of {config.batch_size} repeats samples of clients that have fewer: "
        f"{first_few(few)}",
    )


def check_draws(internal: Dataset, config: ConfigDict) -> None:
    """Raises ConfigError if a round draws more samples than its index can reasonably hold."""
    longest = max(len(domain.train.images) for domain in internal.domains)
    clients = config.clients_per_round or len(internal.domains)
    each = config.local_steps * config.batch_size or max(local_epochs(config)) * longest
    if clients * each > _MOST_DRAWS:
        raise ConfigError(
            f"a round of {clients} clients would draw {clients * each} samples, but it can draw "
            f"{_MOST_DRAWS} at most: lower config.local_steps, config.local_epochs, "
            "config.client_epochs or config.batch_size"
        )
