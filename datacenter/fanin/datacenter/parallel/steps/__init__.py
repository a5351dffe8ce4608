"""The parts of one training step, used by ``parallel.engine``.

Modules, in the order of a step:

- ``passes``: runs a batch through the rank's model, forward and backward
- ``noise``: measures how much gradients differ between the parts of a batch
- ``gradients``: completes, measures and clips the gradients
- ``scaling``: the loss scale of fp16
- ``replicas``: whether the ranks of tp and dp_replicate still have equal parameters
"""
