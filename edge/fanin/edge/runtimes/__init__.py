"""Runtimes: inference libraries behind one contract. Each library is imported by one file only, in ``engines``.

Modules in reading order:

    base          the contract of a runtime
    engine        the contract of an engine, which is what differs between libraries
    available     the known runtimes, and the selection of one
    runtime       a runtime over any engine
    graphs        Signatures over a graph: checks, evaluation, prediction
    stepping      the train step over a graph
    randomness    the random inputs of a train step: dropout masks and noise
    buckets/      graphs of one or several lengths as one callable
    models        graph files from any source, ``preprocess``, and the measurement of ranges
    contract      checks of an engine, for the tests of one's own
    quality       quality of a Version and its limits
    measure       measurement of quality
    evaluations   quality as integer statistics
"""
