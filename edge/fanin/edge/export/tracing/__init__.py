"""Tracing: the prepared module, its loss, its gradient and its optimizer as graphs of plain operators.

Modules, in reading order:

- ``examples``: the batches to trace and to verify with, and the form of the output and the loss.
- ``traced``: the tracer itself; every graph of an export is a ``Traced``.
- ``train``, ``forward``: the graphs of ``train``, and of ``evaluate`` and ``infer``.
- ``backward``: gradients as operators of the graph.
- ``eager``: the train step of eager torch, for ``verify``.
- ``attention``, ``kernels``: plain forms of torch's fused kernels.
- ``reading``: the error for code that reads a tensor's value.
- ``vocabulary``: the number of tokens in a model's vocabulary.
"""
