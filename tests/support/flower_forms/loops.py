"""A Message app around a module with hooks and a trainer that calls them, as Lightning's."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from support.flower_forms.data import pictures

app = ClientApp()


class AutoEncoder(nn.Module):
    """A module with the hooks of a training."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 64))
        self.logged: dict[str, float] = {}

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.decoder(self.encoder(batch)), batch)
        self.logged["train_loss"] = loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Trainer:
    """Runs the hooks."""

    def __init__(self, max_epochs: int) -> None:
        self.max_epochs = max_epochs

    def fit(self, module: AutoEncoder, batches: list[torch.Tensor]) -> None:
        optimizer = module.configure_optimizers()
        for _ in range(self.max_epochs):
            for batch in batches:
                optimizer.zero_grad()
                torch.autograd.backward(module.training_step(batch))
                optimizer.step()

    def test(self, module: AutoEncoder, batches: list[torch.Tensor]) -> float:
        with torch.no_grad():
            return sum(module.training_step(batch).item() for batch in batches) / len(batches)


def initial() -> AutoEncoder:
    torch.manual_seed(1)
    return AutoEncoder()


def batches_of(context: Context) -> list[torch.Tensor]:
    return list(torch.from_numpy(pictures(int(context.node_config["partition-id"]))[0]).flatten(1).split(16))


def loaded(message: Message) -> AutoEncoder:
    module = initial()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return module


@app.train()
def train(message: Message, context: Context) -> Message:
    module, batches = loaded(message), batches_of(context)
    Trainer(max_epochs=int(context.run_config["max-epochs"])).fit(module, batches)
    metrics = MetricRecord({"num-examples": sum(map(len, batches)), **module.logged})
    return Message(RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    batches = batches_of(context)
    loss = Trainer(max_epochs=0).test(loaded(message), batches)
    metrics = MetricRecord({"eval_loss": loss, "num-examples": sum(map(len, batches))})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
