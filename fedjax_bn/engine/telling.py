"""Sends a value for the weighing rule beside the message of a method (`Weighing.tell`)."""

import jax

from fedjax_bn.aggregation import Aggregate, ServerState, ServerUpdate, Weighing, WeighingRule
from fedjax_bn.client import Client, LocalUpdate
from fedjax_bn.engine.batches import Batches
from fedjax_bn.sharing import Variables
from fedjax_bn.state import Received


def telling(
    client: Client, server: ServerUpdate, weigh: WeighingRule | Weighing
) -> tuple[Client, ServerUpdate, WeighingRule | Weighing]:
    """Returns client, server and rule, with an upload for the rule if it has `tell`.

    The message of an upload is then a pair: the method's message, which the server reads, and the
    result of `weigh.tell`, which the rule reads.

    Args:
      client: of any method.
      server: its server's step.
      weigh: its weighing rule.
    """
    if not isinstance(weigh, Weighing) or weigh.tell is None:
        return client, server, weigh
    tell = weigh.tell

    def run(received: Received, batches: Batches, key: jax.Array) -> LocalUpdate:
        update = client.run(received, batches, key)
        return update._replace(message=(update.message, tell(received, update.variables)))

    def update(
        shared: Variables, aggregate: Aggregate, state: ServerState
    ) -> tuple[Variables, ServerState]:
        return server.update(shared, aggregate._replace(message=aggregate.message[0]), state)

    def weigh_told(state: object, sizes: jax.Array, risks: jax.Array, messages: tuple) -> tuple:
        return weigh.weigh(state, sizes, risks, messages[1])

    return (
        client._replace(run=run),
        server._replace(update=update),
        weigh._replace(weigh=weigh_told, tell=None),
    )
