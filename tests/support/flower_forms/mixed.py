"""A Message app whose record has floats of two sizes, integers, bytes and a mask."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from support.flower_forms.data import table

app = ClientApp()


def initial() -> ArrayRecord:
    arrays = {
        "weight": np.linspace(-1.0, 1.0, 6),
        "bias": np.zeros((), np.float32),
        "steps": np.array(0),
        "histogram": np.zeros(4, np.uint8),
        "mask": np.array([True, True, False, True, True, True]),
    }
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


@app.train()
def train(message: Message, context: Context) -> Message:
    arrays = {name: array.numpy().copy() for name, array in message.content["arrays"].items()}
    x = table(int(context.node_config["partition-id"]))[0]
    arrays["weight"] += 0.1 * x.mean(axis=0) * arrays["mask"]
    arrays["bias"] = np.asarray(arrays["bias"] + np.float32(x.mean()))
    arrays["steps"] = np.asarray(arrays["steps"] + 4)
    arrays["histogram"] = arrays["histogram"] + np.array([1, 2, 3, 4], np.uint8)
    record = ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})
    metrics = MetricRecord({"train_loss": float(x.std()), "num-examples": len(x)})
    return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)
