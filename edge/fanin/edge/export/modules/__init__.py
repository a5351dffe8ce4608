"""Modules, calls and random numbers that replace those of an App while it is prepared or traced.

- ``accepted``: the requirements for the module of an App.
- ``gradients``: hooks on gradients, and parameters that no gradient reaches.
- ``places``: replacement of modules, calls with other parameters where modules are shared, and memory formats.
- ``heads``: the last layer, for ``trains="head"``.
- ``adapters``: low-rank adapters for frozen layers.
- ``norms``: BatchNorm whose running statistics are inputs and outputs.
- ``frozen_norms``: frozen BatchNorm folded into the convolution before it.
- ``plain/``: functions that lack a form or a gradient in a graph, as plain functions.
- ``draws``: the random numbers that a module draws, from inputs of the graph.
- ``repeated``: a check that a forward and a loss use only their batch and torch's draws.
- ``watched``: the calls of one pass with their module and line, for errors.
- ``finite``: the first module that returns NaN or infinity, for errors.
- ``origins``: the module that each node of a trace comes from, for errors on devices.

The layers of quantization-aware training are in ``int8.quantization_aware``.
"""
