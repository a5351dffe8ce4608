"""From the Updates of a Round to the next parameters.

Modules, in reading order:

    fold.py          the integer sum: ``begin``, ``accept``, ``merge``, ``finish``
    rules.py         the rules by name: ``Rule`` for sums, ``ColumnRule`` for robust ones; mean and trimmed mean
    sets.py          the fold of a closed set by its rule
    contract.py      the contract of rules, as a check for the tests of a rule of one's own
    weights.py       how much one Update counts
    folding.py       from a committed Update to the fold, and from the sum to the next parameters
    outer.py         the outer step: from the mean update to the next parameters (FedAvg with a server learning rate)
    parameters.py    parameters as blobs and as arrays
    statistics.py    the statistics of a Round
    verify.py        recomputes every Version of a Run
"""
