"""Pools and their gradients without indices and without scatter.

- ``forward``: max and average pools that TFLite has no operator for.
- ``average``: gradients of average pools, and adaptive average pools, as matrix products.
- ``max_backward``: the gradient of a max pool, for ONNX runtimes and for TFLite.
- ``adaptive``: adaptive max pools and their gradients.
"""
