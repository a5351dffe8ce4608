"""A Message app of a torch module in float64."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from support.flower_forms.data import NUM_FEATURES, table

app = ClientApp()


def initial() -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(NUM_FEATURES, 1).double()


@app.train()
def train(message: Message, context: Context) -> Message:
    net = initial()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    features, classes = table(int(context.node_config["partition-id"]))
    x, y = torch.from_numpy(features), torch.from_numpy(classes).double()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x)[:, 0], y)
        torch.autograd.backward(loss)
        return loss

    loss = optimizer.step(closure)
    metrics = MetricRecord({"train_loss": float(loss.detach()), "num-examples": len(x)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)
