"""A Message app of a small network in float32, with the number of each class as a list metric."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from support.flower_forms.data import NUM_CLASSES, NUM_FEATURES, Floats, probabilities, table

app = ClientApp()


def initial() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = ((NUM_FEATURES, 8), (8,), (8, NUM_CLASSES), (NUM_CLASSES,))
    return [(0.3 * rng.standard_normal(shape)).astype(np.float32) for shape in shapes]


def forward(weights: list[np.ndarray], x: Floats) -> tuple[Floats, Floats]:
    hidden = np.maximum(x @ weights[0] + weights[1], 0.0)
    return hidden, probabilities(hidden @ weights[2] + weights[3])


@app.train()
def train(message: Message, context: Context) -> Message:
    weights = message.content["arrays"].to_numpy_ndarrays()
    x, y = table(int(context.node_config["partition-id"]))
    lr = message.content["config"]["lr"]
    for _ in range(int(context.run_config["local-epochs"])):
        hidden, predicted = forward(weights, x)
        error = (predicted - np.eye(NUM_CLASSES)[y]) / len(x)
        inner = (error @ weights[2].T) * (hidden > 0)
        gradients = [x.T @ inner, inner.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
        weights = [weight - lr * gradient for weight, gradient in zip(weights, gradients, strict=True)]
    arrays = ArrayRecord([weight.astype(np.float32) for weight in weights])
    counts = np.bincount(y, minlength=NUM_CLASSES).tolist()
    metrics = MetricRecord({"num-examples": len(x), "classes": counts})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    x, y = table(int(context.node_config["partition-id"]))
    predicted = forward(message.content["arrays"].to_numpy_ndarrays(), x)[1]
    metrics = {
        "eval_loss": float(-np.log(predicted[np.arange(len(y)), y]).mean()),
        "eval_acc": float((predicted.argmax(axis=1) == y).mean()),
        "num-examples": len(y),
    }
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
