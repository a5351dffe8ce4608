"""The coordinator's part of algorithms of devices: their rules, their outer optimizers, and what they exclude.

Reading order:

- ``means``: the rules ``fednova`` and ``qfedavg``: a mean, times a number that follows from statistics
- ``feddyn``: the outer optimizer ``feddyn``
- ``checks``: the parts of a Plan that an algorithm needs, and those that it excludes
"""
