"""Modules, calls and random numbers that replace those of an App while it is prepared or traced.

- ``accepted``: what the module of an App must be.
- ``gradients``: hooks on gradients, and parameters that no gradient reaches.
- ``places``: replacement of modules, and calls with other parameters, where modules or weights are shared.
- ``heads``: the last layer, for ``trains="head"``.
- ``adapters``: low-rank adapters beside frozen layers.
- ``norms``: BatchNorm whose running statistics are inputs and outputs.
- ``frozen_norms``: frozen BatchNorm folded into the convolution before it.
- ``plain/``: functions that lack a form or a gradient in a graph, as plain functions.
- ``draws``: the random numbers that a module draws, from inputs of the graph.
- ``repeated``: a forward and a loss that use nothing but their batch and torch's draws.
- ``finite``: which module returns NaN or infinity first, for errors.
- ``origins``: the module that each node of a trace comes from, for errors on devices.

The layers of quantization-aware training are in ``int8.quantization_aware``.
"""
