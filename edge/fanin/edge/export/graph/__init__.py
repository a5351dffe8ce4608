"""The prepared module, its loss, its gradient and its optimizer as graphs of plain operators.

Modules, in reading order:

- ``examples``: the batches to trace and to verify with, and the form of the output and the loss.
- ``traced``: the tracer itself, with the gradient; every graph of an export is a ``Traced``.
- ``train``, ``forward``: the graphs of ``train``, and of ``evaluate`` and ``infer``.
- ``layers``: a single layer with its gradient.
- ``attention``: attention as products and a softmax.
- ``reading``: the error for code that reads a tensor's value.
- ``vocabulary``: the number of tokens in a model's vocabulary.
- ``decompositions/``: operators that a runtime lacks or runs slowly, rewritten.
"""
