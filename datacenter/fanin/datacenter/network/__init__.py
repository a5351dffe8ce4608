"""The network between ranks: its links, and the bytes, results and speed of collectives.

Modules, in reading order:

- ``counters``: counts calls and payload bytes while a job runs.
- ``collectives``: checks every collective against numpy.
- ``links``: latency and bandwidth between ranks.
- ``bandwidths``: times every collective; the program behind ``python benchmarks/collectives.py``.
"""
