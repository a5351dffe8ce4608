"""The preparation of a simulation before its first Round.

Reading order:

- ``arguments``: the checks of ``simulate``'s arguments, and its Plan
- ``preparation``: the App or Flower app with its Bundle, which the simulations of all seeds share
- ``progress``: the lines that a simulation prints
- ``garbage``: the settings of Python's garbage collector
- ``termination``: SIGTERM, so that a simulation leaves no files behind
"""
