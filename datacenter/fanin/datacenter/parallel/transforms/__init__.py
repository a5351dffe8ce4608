"""The changes that ``parallel.build`` makes to a model, one module for each technique.

Modules, in the order of ``build``:

- ``tensor``: tensor parallelism: splits the matrices of a layer over the ranks of ``tp``
- ``ties``: keeps weights shared that are one parameter in the model
- ``recompute``: activation checkpointing
- ``data``: data parallelism: FSDP2 or DistributedDataParallel
- ``slices``: the true bounds of a rank's shard
- ``meta``: parameters on the meta device, until this rank allocates its own slices
"""
