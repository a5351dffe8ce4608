"""Writes two devices' shares of the embedded digits: device-0.npz and device-1.npz, as ``fanin join`` reads them."""

import numpy as np

from fanin.clients.data.digits import split_digits

for index, examples in enumerate(split_digits(num_devices=2, alpha=1.0, seed=1).devices):
    np.savez(f"device-{index}.npz", x=examples.inputs["x"], y=examples.y)
