"""The parts of an App that make an export fail, found after the failure.

- ``parts``: the findings of a failure, each with a name and a remedy.
- ``layers``: a single layer with its gradient as a graph.
- ``calls``: the functions that a forward calls between its layers.
"""
