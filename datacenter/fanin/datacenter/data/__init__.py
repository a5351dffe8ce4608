"""Data: samples of a job, and the order in which it takes them.

Modules, in reading order:

- ``samples``: samples, their order, and a rank's share of a batch.
- ``masked``: masked tokens for encoders.
- ``loading``: samples from the files that a config names.
"""
