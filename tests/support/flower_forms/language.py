"""A NumPyClient of a small encoder of sentences with embeddings, a norm and attention."""

import numpy as np
import torch
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Context
from torch import nn

from support.flower_forms.data import NUM_CLASSES, sentences
from support.flower_forms.variational import set_weights, weights_of


class Encoder(nn.Module):
    """Embeddings of tokens and positions, an attention layer, and a classifier of the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("position_ids", torch.arange(5)[None], persistent=False)
        self.words, self.positions = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.classifier = nn.Linear(8, NUM_CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.words(tokens) + self.positions(self.position_ids))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        logits: torch.Tensor = self.classifier(hidden[:, 0])
        return logits


def network() -> Encoder:
    torch.manual_seed(3)
    return Encoder()


def initial() -> list[np.ndarray]:
    return weights_of(network())


class SentenceClient(NumPyClient):
    """The client."""

    def __init__(self, partition: int) -> None:
        self.net = network()
        self.tokens, self.y = map(torch.from_numpy, sentences(partition))

    def fit(self, parameters: list[np.ndarray], config: dict[str, object]) -> tuple[list[np.ndarray], int, dict]:
        set_weights(self.net, parameters)
        # Not Adam: the gradient of the bias of the keys is rounding error, and Adam steps along its sign.
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(self.net(self.tokens), self.y))
            optimizer.step()
        return weights_of(self.net), len(self.y), {}

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, object]) -> tuple[float, int, dict]:
        set_weights(self.net, parameters)
        with torch.no_grad():
            logits = self.net(self.tokens)
        accuracy = (logits.argmax(1) == self.y).float().mean().item()
        return nn.functional.cross_entropy(logits, self.y).item(), len(self.y), {"accuracy": accuracy}


def client_fn(context: Context) -> Client:
    return SentenceClient(int(context.node_config["partition-id"])).to_client()


app = ClientApp(client_fn=client_fn)
