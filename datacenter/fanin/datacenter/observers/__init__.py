"""Observers: the events that a training publishes while it runs, and their receivers.

Modules, in reading order:

- ``events``: the events of a training.
- ``observer``: the Protocol of an observer, its decisions, and the list of a job's observers.
- ``loading``: observers that a config names.
- ``contract``: the contract of observers, as a check for the tests of an implementation.
"""
