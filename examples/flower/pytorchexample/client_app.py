"""The ClientApp: training and evaluation on the data of one node. It does not know fanin."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from pytorchexample import task

app = ClientApp()
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model of the message on the node's training part."""
    net, (loader, _) = _received(message), _loaders(context)
    loss = task.train(net, loader, context.run_config["local-epochs"], message.content["config"]["lr"], DEVICE)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the model of the message on the node's other pictures."""
    _, loader = _loaders(context)
    loss, accuracy = task.evaluate(_received(message), loader, DEVICE)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)


def _received(message: Message) -> task.Net:
    net = task.Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return net


def _loaders(context: Context):
    node = context.node_config
    return task.load_data(node["partition-id"], node["num-partitions"], context.run_config["batch-size"])
