"""The converter of LiteRT, called with traced graphs.

- ``convert``: repairs of the graphs, and the conversion.
- ``lowerings``: the most frequent operators without JAX.
- ``child``: the conversion in a process of its own.
"""
