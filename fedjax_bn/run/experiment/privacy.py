"""The differential privacy of a configuration, and its record in the files of a run."""

from ml_collections import ConfigDict

from fedjax_bn.engine.privacy import Privacy, epsilon, gaussian
from fedjax_bn.run.errors import ConfigError
from fedjax_bn.run.files.workdir import Record


def choose_privacy(config: ConfigDict) -> Privacy | None:
    """Returns the mechanism of `config.privacy`; None where its clip is 0."""
    keys = config.privacy
    if not keys.clip:
        return None
    seed = config.seed if keys.seed is None else keys.seed
    return gaussian(keys.clip, keys.noise, at=keys.at, seed=seed)


def describe_privacy(config: ConfigDict, clients: int, rounds: int) -> Record:
    """Returns {"privacy": ...} for config.json and summary.json; {} where nothing is clipped.

    Its epsilon is None without noise, which alone bounds it.

    Args:
      config: the run's.
      clients: K.
      rounds: that are or were made.

    Raises:
      ConfigError: dp-accounting is not installed, and there is noise.
    """
    keys = config.privacy
    if not keys.clip:
        return {}
    # Who takes part hides a client only if it is drawn at random and unknown to the server.
    drawn, how = config.clients_per_round, config.participation
    hides = how.draw == "uniform" and not how.trace and not how.dropout and keys.at == "server"
    cohort = (drawn, clients) if 0 < drawn < clients and hides else ()
    try:
        spent = epsilon(keys.noise, rounds, keys.delta, cohort) if keys.noise else None
    except ImportError as error:
        raise ConfigError(str(error)) from error
    return {
        "privacy": {
            "clip": keys.clip,
            "noise": keys.noise,
            "at": keys.at,
            "epsilon": spent,
            "delta": keys.delta,
            "rounds": rounds,
            "neighbours": "a client's data replaced" if cohort else "with or without a client",
        }
    }


def privacy_notes(about: Record) -> tuple[str, ...]:
    """Returns a sentence for the user on what `describe_privacy` returned."""
    if not about:
        return ()
    keys = about["privacy"]
    begin = f"privacy: updates of clients are clipped to norm {keys['clip']:g}"
    if keys["epsilon"] is None:
        return (f"{begin}; without privacy.noise no epsilon follows from that",)
    return (
        f"{begin}, noise of {keys['noise']:g} times that is added by the {keys['at']}: each client "
        f"has (epsilon, delta) = ({keys['epsilon']:.3g}, {keys['delta']:g}) after {keys['rounds']} "
        f"rounds ({keys['neighbours']}), for what is shared; not for losses, accuracies and "
        "personal leaves, see docs/privacy.md",
    )
