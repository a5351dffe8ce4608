"""Convolutions and their gradients, in the forms that each kind of runtime computes best.

- ``form``: the constants of a convolution, and the operator that computes its three gradients.
- ``portable``: forms for TFLite, without transposed convolution and without scatter.
- ``products``: forms for ONNX runtimes, chosen by kind and shape.
- ``bands``: narrow depthwise convolutions as banded matrix products.
- ``layouts``: images with samples last, kept in that order between two products.
"""
