"""The exported graphs do what the module does.

- ``verify``: steps, evaluation, int8 and preprocessing of a Bundle in one runtime.
- ``comparison``: a tensor of a graph against eager torch's, and how much rounding explains.
"""
