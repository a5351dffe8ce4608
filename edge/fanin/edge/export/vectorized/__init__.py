"""The train step of many clients at once, for simulations.

- ``step``: ``VectorStep``, the traced train step of an App, vectorized over clients
- ``gpu``: ``CudaGraphs``, the same on a GPU
- ``runtime``: ``TorchRuntime``, the traced steps of an App that cannot be exported
"""
