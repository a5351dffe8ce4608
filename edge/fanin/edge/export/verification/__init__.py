"""The check that the exported graphs compute the same as the module.

- ``verify``: steps, evaluation, int8 and preprocessing of a Bundle in one runtime.
- ``comparison``: a tensor of a graph against eager torch's, with a bound on rounding errors.
"""
