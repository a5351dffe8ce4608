"""A traced graph as a program, and its decomposition.

- ``program``: a graph as a program of torch that is decomposed once.
- ``parts``: a graph of complex values as one of their real and imaginary parts.
- ``recorder``: the operators of a function on fake tensors, as a graph.
"""
