"""Pipeline parallelism: which rank computes which layers, and in which order.

Modules, in reading order:

- ``schedules``: the schedules and their rules; needs no torch
- ``stages``: cuts a model into the stages of a pipeline
- ``torch_stage``: torch's stage with all of fanin's changes: its spans, and its buffers during shape inference
"""
