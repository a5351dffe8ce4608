"""Training a model over any mesh of ranks with the results of one process.

Modules, in reading order:

- ``layout``: the module names and the splitting plan of a model
- ``settings``: the parallel and training settings of a job
- ``checks``: whether a model, a mesh and a batch fit each other
- ``objective``: the loss that is summed and the count that divides it
- ``vocabulary``: the loss of logits that are split over the vocabulary
- ``build``: puts a model on this rank, in ten ordered steps
- ``engine``: trains the model on this rank: ``step`` and ``evaluate``
- ``batch``: a rank's part of a global batch
- ``gather``: full parameters and gradients from the ranks' shards, and parameters back
- ``layer_times``: measures the time of each layer on this machine
- ``transformers_layout``: layouts for models of the ``transformers`` library
- ``torch_messages``: torch's expected messages, silenced
- ``draws/``: the random numbers that a model draws while it trains
- ``transforms/``: the changes that ``build`` makes to a model
- ``pipelines/``: stages and schedules
- ``steps/``: the parts of one training step
"""
