"""A ClientApp that reads arrays and sends them back, to measure Flower's own cost for a client."""

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Returns the same arrays."""
    found = message.content["arrays"].items()
    record = ArrayRecord({name: Array(array.numpy()) for name, array in found})
    return Message(RecordDict({"arrays": record}), reply_to=message)
