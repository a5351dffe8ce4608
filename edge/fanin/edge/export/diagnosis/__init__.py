"""The parts of an App that make an export fail, found after the failure.

- ``parts``: the findings of a failure, each with a name and a remedy.
- ``watched``: the calls of one pass with their module and line.
- ``finite``: the first module that returns NaN or infinity.
- ``calls``: the functions that a forward calls between its layers.
"""
