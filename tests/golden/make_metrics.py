"""Writes tests/golden/metrics.json: metrics of scikit-learn and torchmetrics, to compare ``fanin.edge.metrics`` with.

    python -m venv build/metrics
    build/metrics/bin/pip install scikit-learn==1.9.1 torchmetrics==1.9.0 torch
    build/metrics/bin/python tests/golden/make_metrics.py

No environment of this repository has the two packages. Each case has ``logits``, ``targets`` and ``values``. A case of
``scores`` (n,) is a model of one value with targets 0 and 1.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import expit, softmax
from sklearn.metrics import log_loss, roc_auc_score, top_k_accuracy_score
from torchmetrics.functional.classification import binary_calibration_error, multiclass_calibration_error

TARGET = Path(__file__).parent / "metrics.json"
NUM_BINS = 15


def eighths(values: np.ndarray) -> np.ndarray:
    """Return values without rounding in float32, some of which are equal."""
    return (np.rint(values * 8) / 8).astype(np.float32)


def labels_case(num: int, num_classes: int, scale: float) -> dict[str, Any]:
    """Return a case of logits; some of them are equal, so that ranks have ties."""
    rng = np.random.default_rng((num, num_classes))
    logits = eighths(rng.normal(0, scale, (num, num_classes)))
    targets = np.where(rng.random(num) < 0.5, logits.argmax(1), rng.integers(0, num_classes, num))
    targets[:num_classes] = np.arange(num_classes)
    classes, chances = np.arange(num_classes), softmax(logits.astype(np.float64), axis=1)
    if num_classes == 2:
        area = roc_auc_score(targets, logits[:, 1] - logits[:, 0])
    else:
        area = roc_auc_score(targets, chances, multi_class="ovr", labels=classes)
    error = multiclass_calibration_error(
        torch.from_numpy(chances), torch.from_numpy(targets), num_classes, n_bins=NUM_BINS, norm="l1"
    )
    values = {"nll": log_loss(targets, chances, labels=classes), "auc": area, "ece": float(error)}
    for k in (2, 3, 5):
        if k < num_classes:
            # scikit-learn breaks ties by the higher class, so they are broken here by less than a step of the logits.
            untied = logits - 1e-4 * classes
            values[f"top{k}_accuracy"] = top_k_accuracy_score(targets, untied, k=k, labels=classes)
    return {"logits": logits.tolist(), "targets": targets.tolist(), "values": values}


def scores_case(num: int) -> dict[str, Any]:
    """Return a case of one value for each example."""
    rng = np.random.default_rng(num)
    scores = eighths(rng.normal(0, 2, num))
    targets = (rng.random(num) < expit(0.7 * scores)).astype(np.int64)
    chances = expit(scores.astype(np.float64))
    pairs = np.stack([1 - chances, chances], axis=1)
    error = multiclass_calibration_error(
        torch.from_numpy(pairs), torch.from_numpy(targets), 2, n_bins=NUM_BINS, norm="l1"
    )
    # torchmetrics' binary error takes p itself as the confidence, and so measures another thing: it is recorded beside.
    of_one = binary_calibration_error(torch.from_numpy(chances), torch.from_numpy(targets), n_bins=NUM_BINS, norm="l1")
    values = {"nll": log_loss(targets, chances), "auc": roc_auc_score(targets, scores), "ece": float(error)}
    return {
        "scores": scores.tolist(),
        "targets": targets.tolist(),
        "values": values,
        "torchmetrics_binary_ece": float(of_one),
    }


if __name__ == "__main__":
    cases = [labels_case(60, 2, 1.0), labels_case(80, 4, 1.5), labels_case(120, 10, 2.0), scores_case(70)]
    TARGET.write_text(json.dumps(cases) + "\n", encoding="utf-8")
