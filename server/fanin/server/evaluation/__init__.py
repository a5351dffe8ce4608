"""Evaluation of Versions by the coordinator, on held-out data that its operator registered.

An evaluation runs in a separate process with the lowest priority. It reads the blobs of a Version and writes nothing.
The coordinator records the metrics with the Version's number. A Round never waits for an evaluation, and the parameters
of a Version do not depend on one.

A second such process measures the ranges of activations for Plans with ``int8.ranges = "data"``. A Round waits for it.

Modules, in reading order:

    metrics.py     the metrics of a Version on a data set
    jobs.py        a job and its reply, as lines between the two processes
    process.py     the process that evaluates, seen from the coordinator
    evaluator.py   ``HeldOutEvaluator``: which Version is next, and the record of its metrics
    datasets.py    the data sets: the check of a Plan's data set before its Run starts, and the ranges of a Version
"""
