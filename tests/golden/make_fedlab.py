"""Writes tests/golden/fedlab.json: Rounds of FedLab, for comparison with FedNova, q-FedAvg and FedDyn.

    python -m venv build/fedlab
    build/fedlab/bin/pip install torch numpy pynvml munch scikit-learn pandas
    build/fedlab/bin/pip download --no-deps --no-binary :all: fedlab==1.3.0 && tar xzf fedlab-1.3.0.tar.gz
    PYTHONPATH=fedlab-1.3.0 build/fedlab/bin/python tests/golden/make_fedlab.py

FedLab's data sets need a torchvision that fits its torch. Its algorithms do not, so its packages are imported without
their ``__init__``. Each case has the parameters of a server, the changes of its clients, and FedLab's next parameters.
"""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

TARGET = Path(__file__).parent / "fedlab.json"
NUM_VALUES, RATE, ALPHA = 5, 0.1, 0.2


def module_of(name: str) -> Any:
    """Import a module of FedLab's algorithms, without the data sets that its packages import."""
    for package in ("fedlab", "fedlab.contrib", "fedlab.contrib.algorithm", "fedlab.contrib.dataset"):
        if package not in sys.modules:
            bare = ModuleType(package)
            bare.__path__ = [str(Path(root) / package.replace(".", "/")) for root in sys.path]  # type: ignore[attr-defined]
            sys.modules[package] = bare
    return importlib.import_module(f"fedlab.contrib.algorithm.{name}")


def server_of(parameters: torch.Tensor, **fields: object) -> SimpleNamespace:
    """Return the fields that ``global_update`` of a server reads, and a place for its result."""
    server = SimpleNamespace(model_parameters=parameters, **fields)
    server.set_model = lambda after: setattr(server, "after", after)
    return server


def vectors(rng: np.random.Generator, num: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(0.0, 1.0, (num, NUM_VALUES)))


def fednova_case(rng: np.random.Generator) -> dict[str, object]:
    start, changes, taus = vectors(rng, 1)[0], vectors(rng, 4), [3, 9, 5, 2]
    server = server_of(start, num_clients=4, num_clients_per_round=4, option="uniform")
    buffer = [(start + change, float(tau)) for change, tau in zip(changes, taus, strict=True)]
    module_of("fednova").FedNovaServerHandler.global_update(server, buffer)
    return {"start": start.tolist(), "changes": changes.tolist(), "steps": taus, "after": server.after.tolist()}


class OneStep(SimpleNamespace):
    """A client whose training moves its parameters by a change, with a loss."""

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        return data

    def train(self) -> None:
        """The mode of the module."""


def qfedavg_case(rng: np.random.Generator, q: float) -> dict[str, object]:
    start, changes, losses = vectors(rng, 1)[0], vectors(rng, 4), [0.3, 2.0, 0.9, 0.0]
    buffer = []
    for change, loss in zip(changes, losses, strict=True):
        value = torch.tensor(loss, dtype=torch.float64, requires_grad=True)
        client = SimpleNamespace(
            epochs=1,
            cuda=False,
            lr=RATE,
            q=q,
            _LOGGER=SimpleNamespace(info=lambda text: None),
            _model=OneStep(),
            model_parameters=start + change,
            set_model=lambda parameters: None,
            criterion=lambda outputs, target, value=value: value * 1.0,
            optimizer=SimpleNamespace(zero_grad=lambda: None, step=lambda: None),
        )
        module_of("qfedavg").qFedAvgClientTrainer.train(client, start, [(torch.zeros(1), torch.zeros(1))])
        buffer.append((client.delta, client.hk))
    server = server_of(start)
    module_of("qfedavg").qFedAvgServerHandler.global_update(server, buffer)
    after = server.after.tolist()
    return {"start": start.tolist(), "changes": changes.tolist(), "losses": losses, "q": q, "after": after}


def feddyn_case(rng: np.random.Generator) -> dict[str, object]:
    """One client in each Round: with more, FedLab subtracts the parameters once, and not once for each client."""
    start, changes, results = vectors(rng, 1)[0], vectors(rng, 3), []
    server = server_of(start, num_clients=4, alpha=ALPHA, h=torch.zeros(NUM_VALUES, dtype=torch.float64))
    for change in changes:
        module_of("feddyn").FedDynServerHandler.global_update(server, [(server.model_parameters + change,)])
        server.model_parameters = server.after
        results.append(server.after.tolist())
    return {"start": start.tolist(), "changes": changes.tolist(), "num_devices": 4, "after": results}


if __name__ == "__main__":
    generator = np.random.default_rng(7)
    cases = {
        "fednova": fednova_case(generator),
        "qfedavg": [qfedavg_case(generator, q) for q in (0.0, 0.5, 2.0)],
        "feddyn": feddyn_case(generator),
    }
    TARGET.write_text(json.dumps({"rate": RATE, **cases}, indent=1) + "\n")
