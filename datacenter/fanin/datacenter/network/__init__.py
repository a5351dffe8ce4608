"""The collectives between ranks: counts their bytes, checks their results and measures their speed.

Modules, in reading order:

- ``counters``: counts calls and payload bytes while a job runs.
- ``collectives``: checks every collective against numpy.
- ``bandwidths``: times every collective; the program behind ``fanin bench collectives``.
"""
