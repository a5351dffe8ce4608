"""Pipeline parallelism: which rank computes which layers, and in which order.

Modules, in reading order:

- ``schedules``: the schedules and their rules; needs no torch
- ``stages``: cuts a model into the stages of a pipeline
- ``shape_inference``: protects buffers while torch infers the shapes of activations
"""
