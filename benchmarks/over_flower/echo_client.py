"""A ClientApp that reads what it gets and sends it back: what Flower itself costs a client."""

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Returns the same arrays."""
    found = message.content["arrays"].items()
    record = ArrayRecord({name: Array(array.numpy()) for name, array in found})
    return Message(RecordDict({"arrays": record}), reply_to=message)
