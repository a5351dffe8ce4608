"""The module of an App made traceable, and the layers, calls and random numbers that replace those of it.

- ``prepare``: the module prepared for tracing.
- ``gradients``: hooks on gradients, and parameters that no gradient reaches.
- ``places``: replacement of modules, calls with other parameters where modules are shared, and memory formats.
- ``lengths``: a prepared App for one of its lengths.
- ``heads``: the last layer, for ``trains="head"``.
- ``adapters``: low-rank adapters for frozen layers.
- ``quantization_aware``: layers that round to 8 bits in the train step.
- ``norms``: BatchNorm whose running statistics are inputs and outputs.
- ``frozen_norms``: frozen BatchNorm folded into the convolution before it.
- ``kernels``: plain forms of torch's fused kernels.
- ``plain/``: functions that lack a form or a gradient in a graph, as plain functions.
- ``draws``: the random numbers that a module draws, from inputs of the graph.
- ``origins``: the module that each node of a trace comes from, for errors on devices.
"""
