"""A Message app that trains and sends two small matrices beside a frozen layer, as adapters of a language model."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from support.flower_forms.data import NUM_CLASSES, NUM_FEATURES, table

app = ClientApp()
RANK = 2


class Adapted(nn.Module):
    """A frozen layer with a trained product of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(NUM_FEATURES, NUM_CLASSES).requires_grad_(requires_grad=False)
        self.lora_a = nn.Parameter(torch.randn(NUM_FEATURES, RANK))
        self.lora_b = nn.Parameter(torch.zeros(RANK, NUM_CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.base(x) + x @ self.lora_a @ self.lora_b
        return logits


def network() -> Adapted:
    torch.manual_seed(6)
    return Adapted()


def adapters_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in net.state_dict().items() if "lora" in name}


def initial() -> dict[str, torch.Tensor]:
    return adapters_of(network())


@app.train()
def train(message: Message, context: Context) -> Message:
    net = network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    features, classes = table(int(context.node_config["partition-id"]))
    x, y = torch.from_numpy(features).float(), torch.from_numpy(classes)
    # The rate falls with the number of the round, as a schedule of the whole training.
    rate = 0.1 / float(message.content["config"]["server-round"])
    optimizer = torch.optim.Adam([net.lora_a, net.lora_b], lr=rate)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(x)})
    return Message(RecordDict({"arrays": ArrayRecord(adapters_of(net)), "metrics": metrics}), reply_to=message)
