"""Decompositions: operators that a runtime lacks or runs slowly, rewritten in operators that it has.

torch decomposes most backward operators into its core set. This room holds the others. Each form is exact up to the
order of additions and is tested against torch's own kernel in float64.

A form has the parameters of its operator, in the order of the ATen schema. Some have plainer names: ``x`` for ``self``
and ``input``, ``dy`` for ``grad_output``. If a form returns ``NotImplemented``, the operator is kept.

Modules, in reading order:

- ``tables``: which form replaces which operator in a graph format; the entry point of the room.
- ``programs/``: a traced graph as a program, and its decomposition by one pass.
- ``windows``: slices, paddings and zero insertion that the other modules share.
- ``convolution/``: convolutions and their gradients for ONNX runtimes and for TFLite.
- ``pooling/``: average, max and adaptive pools and their gradients.
- ``elementwise``, ``norms``, ``sequences``: activations, norms and operators of transformers.
- ``selection``, ``ordering``, ``resampling``, ``padding``: gathers, sorting, upsampling and padding without a scatter.
"""
