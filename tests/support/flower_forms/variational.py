"""A NumPyClient of a variational autoencoder that draws its noise, and sends its ``state_dict`` as a list."""

import numpy as np
import torch
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Context
from torch import nn

from support.flower_forms.data import pictures


class Variational(nn.Module):
    """The network."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.log_variance = nn.Linear(64, 16), nn.Linear(16, 2), nn.Linear(16, 2)
        self.decoder = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 64))

    def forward(self, x: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
        hidden = torch.relu(self.encoder(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn(mean.shape, generator=noise)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        loss: torch.Tensor = nn.functional.mse_loss(self.decoder(z), x) + 0.01 * divergence
        return loss


def network() -> Variational:
    torch.manual_seed(2)
    return Variational()


def initial() -> list[np.ndarray]:
    return weights_of(network())


def weights_of(net: nn.Module) -> list[np.ndarray]:
    return [value.cpu().numpy() for value in net.state_dict().values()]


def set_weights(net: nn.Module, weights: list[np.ndarray]) -> None:
    names = net.state_dict().keys()
    net.load_state_dict({name: torch.tensor(value) for name, value in zip(names, weights, strict=True)}, strict=True)


class GenerativeClient(NumPyClient):
    """The client."""

    def __init__(self, partition: int) -> None:
        self.net, self.x = network(), torch.from_numpy(pictures(partition)[0]).flatten(1)
        self.noise = torch.Generator().manual_seed(partition)

    def fit(self, parameters: list[np.ndarray], config: dict[str, float]) -> tuple[list[np.ndarray], int, dict]:
        set_weights(self.net, parameters)
        optimizer = torch.optim.Adam(self.net.parameters(), lr=config["lr"])
        for _ in range(4):
            optimizer.zero_grad()
            torch.autograd.backward(self.net(self.x, self.noise))
            optimizer.step()
        return weights_of(self.net), len(self.x), {}

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, object]) -> tuple[float, int, dict]:
        set_weights(self.net, parameters)
        with torch.no_grad():
            return self.net(self.x, self.noise).item(), len(self.x), {}


def client_fn(context: Context) -> Client:
    return GenerativeClient(int(context.node_config["partition-id"])).to_client()


app = ClientApp(client_fn=client_fn)
