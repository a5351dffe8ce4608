"""The part of int8 that both graph formats share: the graph with slots, and layers that train with its rounding.

- ``folding``: the ``infer`` graph with norms folded into products, and the sources of its slots.
- ``activations``: the ranges of activations, which the graphs of all lengths share, and the weights that stay float.

``onnx.int8`` and ``tflite.int8`` quantize the folded graph in their formats.
"""
