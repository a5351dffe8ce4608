"""A Message app of a network with a norm, whose ``state_dict`` has an integer counter."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from support.flower_forms.data import NUM_CLASSES, pictures

app = ClientApp()


def initial() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, NUM_CLASSES))


def loaded(message: Message) -> nn.Module:
    net = initial()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=True)
    return net


def examples(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = pictures(int(context.node_config["partition-id"]))
    return torch.from_numpy(x), torch.from_numpy(y)


@app.train()
def train(message: Message, context: Context) -> Message:
    net, (x, y) = loaded(message), examples(context)
    optimizer = torch.optim.SGD(net.parameters(), lr=message.content["config"]["lr"], momentum=0.9)
    total = 0.0
    for part in torch.arange(len(x)).split(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x[part]), y[part])
        torch.autograd.backward(loss)
        optimizer.step()
        total += loss.item() * len(part)
    metrics = MetricRecord({"train_loss": total / len(x), "num-examples": len(x)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    net, (x, y) = loaded(message).eval(), examples(context)
    with torch.no_grad():
        logits = net(x)
    metrics = {
        "eval_loss": nn.functional.cross_entropy(logits, y).item(),
        "eval_acc": (logits.argmax(1) == y).float().mean().item(),
        "num-examples": len(x),
    }
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
