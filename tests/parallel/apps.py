"""Apps that fail, stop or wait, for the tests of the launcher. They write to the folder ``FANIN_TEST_FOLDER``."""

import dataclasses
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import NoReturn

import torch

from fanin.datacenter.checkpoints.progress import MARKER
from fanin.datacenter.files.jobfiles import SEED_FILE
from fanin.datacenter.models.digits_app import app
from fanin.datacenter.models.seeding import seeded
from fanin.edge.export.app.app import App
from fanin.edge.export.app.losses import BatchLoss, next_token
from fanin.edge.export.app.optimizers.recipe import Adapters, Recipe


def crashing() -> App:
    """Raise an error of the App's own on rank 1; rank 0 waits for it in a collective."""
    if os.environ["RANK"] == "1":
        raise ArithmeticError("the App broke on rank 1")
    return app()


def killed() -> App:
    """End rank 1 without a message."""
    if os.environ["RANK"] == "1":
        os._exit(77)
    return app()


def dying() -> App:
    """Return the digits' App, which kills rank 1 once, in its ninth step."""
    calls = 0

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        # A checkpoint is written while the job trains. It is complete some time after its step.
        time.sleep(0.1)
        if calls == 9 and (os.environ.get("RANK"), os.environ.get("TORCHELASTIC_RESTART_COUNT")) == ("1", "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        return digits.loss(outputs, targets)

    digits = app()
    return dataclasses.replace(digits, loss=loss)


LOST_EVERY = 4
"""Steps between the checkpoints of ``lost``."""


def lost() -> App:
    """Return an App that draws other values in each process and kills rank 1 twice.

    Rank 1 is killed in its third step, and in the eighth step of the next attempt. The second kill waits for the
    checkpoint of the fourth step, which threads of the ranks write.
    """
    folder, calls = Path(os.environ["FANIN_TEST_FOLDER"]), 0
    last_step = {"0": 3, "1": 8}.get(os.environ.get("TORCHELASTIC_RESTART_COUNT", ""))

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        if calls == last_step and os.environ["RANK"] == "1":
            shutil.copy(folder / "job" / SEED_FILE, folder / f"before-{last_step}.safetensors")
            while last_step > LOST_EVERY and not (folder / "checkpoints" / MARKER).exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return digits.loss(outputs, targets)

    digits = app()
    for parameter in digits.module.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(os.getpid()))
    return dataclasses.replace(digits, loss=loss)


def stopping() -> App:
    """Return the digits' App, which sends its process SIGTERM in the third step."""
    calls = 0

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        if calls == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return digits.loss(outputs, targets)

    digits = app()
    return dataclasses.replace(digits, loss=loss)


class Bare(torch.nn.Module):
    """A model without submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) @ self.weight


def bare() -> App:
    """Return an App whose loss is slow in evaluation."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            time.sleep(0.3)
        return digits.loss(outputs, targets)

    digits = app()
    return dataclasses.replace(digits, name="bare", module=Bare(), loss=loss)


class Idle(Bare):
    """The same with a parameter that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = torch.nn.Parameter(torch.zeros(3))


def idle() -> App:
    """Return an App with an unused parameter."""
    return dataclasses.replace(app(), name="idle", module=Idle())


def paced() -> App:
    """Return the digits' App. A file sets the seconds of each step, also of the current one."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        pace, began_s = Path(os.environ["FANIN_TEST_FOLDER"], "pace"), time.monotonic()
        while time.monotonic() - began_s < float(pace.read_text()):
            time.sleep(0.02)
        return digits.loss(outputs, targets)

    digits = app()
    return dataclasses.replace(digits, loss=loss)


class Double(torch.nn.Module):
    """A small perceptron that computes in float64, for inputs of any type."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.layers = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10))
        self.double()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.layers(images.flatten(1).double())
        return values


def precise() -> App:
    """Return ``paced`` with a model in float64."""
    return dataclasses.replace(paced(), name="precise", module=Double())


def stacked() -> App:
    """Return an App with four equal layers between two others, which can be cut by name and split."""
    module = torch.nn.Sequential()
    with seeded(0):
        module.add_module("flatten", torch.nn.Flatten())
        module.add_module("embed", torch.nn.Linear(64, 16))
        layers = [(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)) for _ in range(4)]
        module.add_module("layers", torch.nn.Sequential(*(torch.nn.Sequential(*layer) for layer in layers)))
        module.add_module("head", torch.nn.Linear(16, 10))
    return App(name="stacked", module=module, calibration=app().inputs["x"], batch_size=16, num_classes=10)


class TiedTokens(torch.nn.Module):
    """A user's own module. Its embedding is also its head, and its layers compute each position independently."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.embed = torch.nn.Embedding(12, 8)
            self.layers = torch.nn.ModuleList(Residual() for _ in range(2))
            self.norm = torch.nn.LayerNorm(8)
            self.head = torch.nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.embed(tokens)
        for layer in self.layers:
            stream = layer(stream)
        logits: torch.Tensor = self.head(self.norm(stream))
        return logits


class Residual(torch.nn.Module):
    """A perceptron whose output is added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.perceptron = torch.nn.Sequential()
        self.perceptron.add_module("up", torch.nn.Linear(8, 16))
        self.perceptron.add_module("tanh", torch.nn.Tanh())
        self.perceptron.add_module("down", torch.nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.perceptron(x)
        return output


def tied() -> App:
    """Return an App that predicts the next token."""
    tokens = torch.arange(24, dtype=torch.int32).reshape(6, 4) % 12
    return App(name="tied", module=TiedTokens(), calibration=tokens, batch_size=2, num_classes=12, loss=next_token)


def tied_double() -> App:
    """Return ``tied`` with a model in float64."""
    return dataclasses.replace(tied(), module=TiedTokens().double())


def adapted() -> App:
    """Return an App that trains only adapters."""
    return dataclasses.replace(tied(), recipe=Recipe(trains=Adapters(rank=1)))


def normed() -> App:
    """Return an App with running statistics."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    return App(name="normed", module=module, calibration=torch.rand(4, 3), batch_size=2, num_classes=4)


def classes_first() -> App:
    """Return an App whose logits (B, C, T) have the classes in axis 1, as torch's losses accept them."""
    return App(
        name="classes_first",
        module=torch.nn.Conv1d(2, 3, 1),
        calibration=torch.rand(8, 2, 4),
        batch_size=8,
        num_classes=3,
        class_axis=1,
        loss=lambda output, y: torch.nn.functional.cross_entropy(output, y, reduction="none").mean(dim=1),
    )


def counted() -> App:
    """Return an App that predicts the logarithms of rates (B, 3, T), for counts of the same shape."""
    return App(
        name="counted",
        module=torch.nn.Conv1d(2, 3, 1),
        calibration=torch.rand(8, 2, 4),
        batch_size=8,
        targets=torch.ones(8, 3, 4, dtype=torch.int64),
        loss=lambda output, y: torch.nn.functional.poisson_nll_loss(output, y, reduction="none").mean(dim=(1, 2)),
    )


def sleeping() -> NoReturn:
    """Write the process ids of the rank and its agent, then wait."""
    agent = multiprocessing.parent_process()
    assert agent is not None
    draft = Path(os.environ["FANIN_TEST_FOLDER"]) / f"draft-{os.environ['RANK']}"
    draft.write_text(f"{os.getpid()} {agent.pid}")
    draft.rename(draft.with_name(f"pids-{os.environ['RANK']}"))
    while True:
        time.sleep(1.0)


def contrasted() -> App:
    """Return an App in float64 whose loss compares each sample with the others of its batch."""

    def contrast(outputs: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = (outputs @ outputs.T).masked_fill(mask == 0, -1e9)
        losses = torch.nn.functional.cross_entropy(scores, torch.arange(len(mask)), reduction="none")
        return (mask * losses).sum() / mask.sum()

    return dataclasses.replace(app(), name="contrasted", module=Double(), loss=BatchLoss(contrast))
