"""Functions of torch that lack a form or a gradient in a graph, computed by functions that have both.

- ``functions``: ``PlainFunctions``, which replaces calls while a module is traced, and the table of the functions.
- ``embeddings``: bags of embeddings and ``one_hot``.
- ``arithmetic``: products, exponentials of matrices, ``erfc``, distances, bilinear forms and shrinkage.
- ``alignments``: ``ctc_loss``.
- ``contractions``: ``einsum`` of three and more tensors.
- ``images``: circular padding, patches, 3-D and adaptive pools, response normalization and sampling at a grid.

Each form has torch's own parameters, except that a first parameter ``input`` has another name. It returns
``NotImplemented`` for arguments that are left to torch. A function whose result shares memory with its input is none of
these: a module may write into the result. Its gradient has a form in ``decompositions`` instead.
"""
