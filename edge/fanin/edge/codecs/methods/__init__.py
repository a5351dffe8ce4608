"""Stages of algorithms of devices: each prepares the training, or changes what is sent after it.

Reading order:

- ``fednova``: the change divided by the weight of its steps
- ``qfedavg``: the change multiplied by a power of the loss
- ``feddyn``: a linear term of each device, and the proximal term
"""
