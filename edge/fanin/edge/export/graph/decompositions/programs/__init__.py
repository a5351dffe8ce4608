"""A traced graph as a program, and its decomposition.

- ``program``: a graph as a program of torch that is decomposed once.
- ``recorder``: the operators of a function on fake tensors, as a graph.
"""
