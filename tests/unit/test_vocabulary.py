"""``tracing.vocabulary``: the tokens that a Bundle's model knows, and the device's error for an unknown token."""

from functools import cache

import numpy as np
import pytest
import torch
from support.models import export_bundle
from support.values import assignment
from torch import Tensor, nn

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import App, next_token
from fanin.edge.export.graph.vocabulary import count_tokens
from fanin.edge.export.module.prepare import prepare
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch, StepSettings
from fanin.edge.runtimes.models import model_inputs

NUM_TOKENS, LENGTH = 11, 5


class Tokens(nn.Module):
    """A model with one table for tokens and one for positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(NUM_TOKENS, 4), nn.Embedding(LENGTH, 4)
        self.head = nn.Linear(4, NUM_TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.tokens(x) + self.places(torch.arange(x.shape[1])))


class Functional(Tokens):
    """A lookup in int64 without a layer, and a smaller table for values that are computed from the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        vectors = nn.functional.embedding(x.to(torch.int64), self.tokens.weight)
        return self.head(vectors + self.places(x.clamp(max=LENGTH - 1)))


class Twice(Tokens):
    """A lookup of the same tokens in two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Embedding(NUM_TOKENS + 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.tokens(x) + self.more(x))


class Compared(Tokens):
    """A model without a lookup: any number is a token."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head((x.unsqueeze(-1) == torch.arange(4)).float())


def app_of(module: nn.Module) -> App:
    """Return an App of tokens."""
    tokens = torch.arange(8 * LENGTH, dtype=torch.int32).reshape(8, LENGTH) % NUM_TOKENS
    return App(name="tokens", module=module, calibration=tokens, batch_size=2, num_classes=NUM_TOKENS, loss=next_token)


@pytest.mark.parametrize(
    ("module_class", "num"), [(Tokens, NUM_TOKENS), (Functional, NUM_TOKENS), (Twice, NUM_TOKENS), (Compared, 0)]
)
def test_the_tokens_of_the_lookup_table_are_counted(module_class: type[nn.Module], num: int) -> None:
    assert count_tokens(prepare(app_of(module_class()))) == ({"x": num} if num else {})


def test_inputs_that_are_no_tokens_are_not_counted() -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    app = App(name="floats", module=module, calibration=torch.zeros(2, 3), batch_size=2, num_classes=2)
    assert count_tokens(prepare(app)) == {}


@cache
def bundle() -> Bundle:
    """The Bundle of the token model, exported once."""
    torch.manual_seed(0)
    return export_bundle(app_of(Tokens()))


def with_token(token: int, num: int = 2) -> np.ndarray:
    """Return zero tokens, except for one token of the last sample."""
    x = np.zeros((num, LENGTH), np.int32)
    x[-1, 2] = token
    return x


@pytest.mark.parametrize("token", [NUM_TOKENS, 70, 2**31 - 1, -1])
def test_an_unknown_token_is_an_error_in_every_call(token: int) -> None:
    runtime, token_bundle = open_runtime("onnx"), bundle()
    assert token_bundle.manifest.num_tokens == {"x": NUM_TOKENS}
    parameters, x = token_bundle.initial_parameters(), with_token(token)
    batch = PaddedBatch(inputs={"x": x}, y=np.zeros((2, LENGTH), np.int32), mask=np.ones(2, np.float32))
    step, evaluate = runtime.open_train(token_bundle), runtime.open_evaluate(token_bundle)
    predict = runtime.open_predict(token_bundle, parameters)
    for call in (
        lambda: step(step.begin(parameters), batch, StepSettings(learning_rate=0.1)),
        lambda: evaluate(parameters, batch),
        lambda: predict({"x": x}),
        lambda: model_inputs(token_bundle, {"x": x}, None),
    ):
        with pytest.raises(ValueError, match=rf"x: token {token} at sample 1, expected 0 to {NUM_TOKENS - 1}"):
            call()


def test_the_last_token_of_a_table_and_no_tokens_at_all_are_valid() -> None:
    runtime, token_bundle = open_runtime("onnx"), bundle()
    predict = runtime.open_predict(token_bundle, token_bundle.initial_parameters())
    assert predict({"x": with_token(NUM_TOKENS - 1)}).shape == (2, LENGTH, NUM_TOKENS)
    assert predict({"x": with_token(0)[:0]}).shape == (0, LENGTH, NUM_TOKENS)


@pytest.mark.parametrize("part", ["training", "validation"])
def test_a_device_names_its_examples_with_an_unknown_token(part: str) -> None:
    good, bad = (
        Examples(inputs={"x": with_token(token, num=4)}, y=np.zeros((4, LENGTH), np.int32)) for token in (0, NUM_TOKENS)
    )
    store = MemoryStore(
        partition=0, train=bad if part == "training" else good, validation=bad if part == "validation" else good
    )
    trainer, token_bundle = RuntimeTrainer(open_runtime("onnx"), store), bundle()
    model = OpenedModel(bundle=token_bundle, parameters=token_bundle.initial_parameters())
    with pytest.raises(ValueError, match=rf"{part} examples: x: token {NUM_TOKENS} at sample 3, expected 0 to 10"):
        trainer.train(model, assignment(), lambda: True)
