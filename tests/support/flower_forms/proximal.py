"""A Message app of FedProx: the loss has the distance to the received model, with ``proximal-mu`` of the config."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from support.flower_forms.data import NUM_CLASSES, NUM_FEATURES, table

app = ClientApp()


def initial() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    return nn.Linear(NUM_FEATURES, NUM_CLASSES).state_dict()


@app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    net = nn.Linear(NUM_FEATURES, NUM_CLASSES)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    received = [value.detach().clone() for value in net.parameters()]
    features, classes = table(int(context.node_config["partition-id"]))
    x, y = torch.from_numpy(features).float(), torch.from_numpy(classes)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(int(config["local-epochs"])):
        optimizer.zero_grad()
        distance = sum(((now - then) ** 2).sum() for now, then in zip(net.parameters(), received, strict=True))
        loss = nn.functional.cross_entropy(net(x), y) + 0.5 * config["proximal-mu"] * distance
        torch.autograd.backward(loss)
        optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(x)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)
