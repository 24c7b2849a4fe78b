"""A Grid of Flower whose ClientApps run in this process; messages go through Flower's own bytes."""

from functools import cache

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import Context, Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid:
    """What `fedjax_bn.flower.server.serve` asks of a Grid.

    A node is `answer(message) -> message`, None if it never answers, or the error of Flower if its
    bytes cannot be read. `sent` has (message, reply) of all that was answered.
    """

    def __init__(self, nodes):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0
        self.nodes, self.sent, self.waiting, self.keys = dict(nodes), [], {}, {}

    def get_nodes(self):
        keys = {number: self.keys.get(number, key_of(number)) for number in self.nodes}
        return [NodeInfo(node_id=number, public_key=key) for number, key in keys.items()]

    def push_messages(self, messages):
        names = []
        for message in messages:
            name = f"{len(self.sent)}-{message.metadata.dst_node_id}-{message.object_id}"
            message.metadata.__dict__["_message_id"] = name
            names.append(name)
            answer = self.nodes.get(message.metadata.dst_node_id)
            if answer is None:
                continue
            if isinstance(answer, Exception):
                self.waiting[name] = answer
                continue
            arrived = over_the_wire(message)
            try:
                reply = answer(arrived)
            except Exception as error:
                reason = f"{type(error)}:<'{error}'>"
                reply = FlowerMessage(Error(code=3, reason=reason), reply_to=arrived)
            reply = over_the_wire(reply)
            self.sent.append((arrived, reply))
            self.waiting[name] = reply
        return names

    def pull_messages(self, names):
        found = [self.waiting.pop(name) for name in names if name in self.waiting]
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found


@cache
def key_of(number):
    """The PEM of the public key that a node of this number has in all tests of a process."""
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def over_the_wire(message):
    """The message that arrives where this one is sent."""
    data = message_to_proto(message).SerializeToString()
    return message_from_proto(Message.FromString(data))


def node(app, run_config, **node_config):
    """A node that runs a ClientApp."""
    config = {key.replace("_", "-"): value for key, value in node_config.items()}

    def answer(message):
        context = Context(1, message.metadata.dst_node_id, config, RecordDict(), run_config)
        return app(message, context)

    return answer
