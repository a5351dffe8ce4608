"""A NumPyClient around an estimator with ``coef_`` and ``intercept_`` of float64, as of scikit-learn."""

import numpy as np
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Context

from support.flower_forms.data import NUM_CLASSES, NUM_FEATURES, Floats, Ints, probabilities, table


class Classifier:
    """Logistic regression that continues from its coefficients."""

    def __init__(self, steps: int = 5) -> None:
        self.steps = steps
        self.coef_ = np.zeros((NUM_CLASSES, NUM_FEATURES))
        self.intercept_ = np.zeros(NUM_CLASSES)

    def fit(self, x: Floats, y: Ints) -> None:
        """Take gradient steps over all examples."""
        target = np.eye(NUM_CLASSES)[y]
        for _ in range(self.steps):
            error = (self.predict_proba(x) - target) / len(x)
            self.coef_ -= 2.0 * error.T @ x
            self.intercept_ -= 2.0 * error.sum(axis=0)

    def predict_proba(self, x: Floats) -> Floats:
        """Return the probability of each class."""
        return probabilities(x @ self.coef_.T + self.intercept_)


def parameters_of(model: Classifier) -> list[Floats]:
    return [model.coef_, model.intercept_]


def initial() -> list[Floats]:
    return parameters_of(Classifier())


class EstimatorClient(NumPyClient):
    """The client."""

    def __init__(self, model: Classifier, x: Floats, y: Ints) -> None:
        self.model, self.x, self.y = model, x, y

    def fit(self, parameters: list[Floats], config: dict[str, object]) -> tuple[list[Floats], int, dict[str, object]]:
        self.model.coef_, self.model.intercept_ = (value.copy() for value in parameters)
        self.model.fit(self.x, self.y)
        return parameters_of(self.model), len(self.x), {}

    def evaluate(self, parameters: list[Floats], config: dict[str, object]) -> tuple[float, int, dict[str, object]]:
        self.model.coef_, self.model.intercept_ = parameters
        predicted = self.model.predict_proba(self.x)
        loss = -np.log(predicted[np.arange(len(self.y)), self.y]).mean()
        accuracy = float((predicted.argmax(axis=1) == self.y).mean())
        return float(loss), len(self.x), {"accuracy": accuracy}


def client_fn(context: Context) -> Client:
    x, y = table(int(context.node_config["partition-id"]))
    return EstimatorClient(Classifier(), x, y).to_client()


app = ClientApp(client_fn=client_fn)
