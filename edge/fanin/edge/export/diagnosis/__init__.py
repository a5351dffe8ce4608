"""The reason of a failed export and its remedy. A good export imports none of these modules (a test proves it).

- ``lines``: the lines of the App's own code.
- ``raised``: the error for an exception of the App's code during a trace.
- ``outputs``: the remedy for an output or a loss of a wrong form.
- ``watched``: the events of one pass with their module and line: the first change, difference, NaN or infinity.
- ``parts``: the layers and functions that a graph format cannot express.
"""
