"""The outer step: from the mean update to the next parameters (FedAvg with a server learning rate).

An update is the parameters after training minus those before, so it is added.
"""

import numpy as np

from fanin.edge.tensors import Float32s, Float64s


def apply_fedavg(parameters: Float32s, mean: Float64s, learning_rate: float) -> Float32s:
    """Return parameters + learning rate * mean update: FedAvg with a server learning rate.

    The result has the shape (num_values,). It is computed in float64 and rounded once to float32.

    Reference:
        McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data,
        arXiv 1602.05629, algorithm 1. Reddi et al. 2021, Adaptive Federated Optimization, arXiv 2003.00295,
        algorithm 1 with SGD.
    """
    return (parameters.astype(np.float64) + learning_rate * mean).astype(np.float32)
