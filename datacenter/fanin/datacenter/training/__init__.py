"""Training: the loop of optimizer steps and evaluations on one rank.

Modules, in reading order:

- ``model``: a job's model and data, from its config.
- ``parameters``: a module's parameters as one flat vector.
- ``loop``: the training loop.
- ``state``: the loop's state, and how a loop begins.
- ``decisions``: one verdict for all ranks: whether the training continues.
- ``rates``: learning rates.
- ``communication``: compressed gradients and local steps.
- ``pretraining``: a short training of an App in one process.
- ``snapshot``: copies of the parameters in memory.
"""
