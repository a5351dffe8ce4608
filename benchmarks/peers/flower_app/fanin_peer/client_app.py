"""The ClientApp: fresh random values instead of training."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return as many random values as were received."""
    (came,) = message.content["arrays"].to_numpy_ndarrays()
    fresh = np.random.default_rng().random(came.size, dtype=np.float32)
    content = RecordDict({"arrays": ArrayRecord([fresh]), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=message)
