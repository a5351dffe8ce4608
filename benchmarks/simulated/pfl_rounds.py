"""The same with pfl-research: its simulated backend in one process."""

import time

import numpy as np
import torch
from load import accuracy, arguments, arrays, module, report
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Network(nn.Module):
    """The module with the loss and the metrics that pfl asks for."""

    def __init__(self, inner: nn.Sequential) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.inner(x)

    def loss(self, x: Tensor, y: Tensor, **options: bool) -> Tensor:
        """Return the mean loss. pfl passes ``eval``."""
        self.train(not options.get("eval", False))
        return nn.functional.cross_entropy(self(x), y.long())

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor, **_: bool) -> dict[str, object]:
        """Return the loss, weighted by samples."""
        loss = nn.functional.cross_entropy(self(x), y.long(), reduction="sum").item()
        return {"loss": Weighted(loss, len(y))}


class Clock(TrainingProcessCallback):
    """Notes when each round has ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
        """See pfl."""
        self.times.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    """Run all rounds."""
    load, folder = arguments()
    np.random.seed(0)
    data, net = arrays(folder), Network(module(load.model))
    x, y = (torch.from_numpy(data[name]).to(load.device) for name in ("x", "y"))
    users = FederatedDataset(
        lambda user: Dataset(raw_data=[x[user], y[user]], user_id=user),
        get_user_sampler("minimize_reuse", list(range(load.users))),
    )
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=load.rounds,
            # No evaluation in the rounds that are measured.
            evaluation_frequency=load.rounds + 1,
            train_cohort_size=load.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=users, val_data=users),
        model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=load.learning_rate, local_batch_size=load.batch_size
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
    )
    report(np.diff(clock.times).tolist(), accuracy(net.inner, data))


if __name__ == "__main__":
    main()
