"""Outer optimizers: from the mean update to the next parameters.

FedAvg (McMahan et al. 2017, arXiv 1602.05629, algorithm 1) with a server learning rate (Reddi et al. 2021,
arXiv 2003.00295, algorithm 1 with SGD): parameters + learning rate * mean update. The update is what a device
ended with minus what it began with, so the sign is plus.
"""

import numpy as np

from fanin.edge.tensors import Float32s, Float64s


def apply_fedavg(parameters: Float32s, mean: Float64s, learning_rate: float) -> Float32s:
    """The next parameters (num_values,): computed in float64, rounded once to float32."""
    return (parameters.astype(np.float64) + learning_rate * mean).astype(np.float32)
