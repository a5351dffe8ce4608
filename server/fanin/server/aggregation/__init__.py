"""From the Updates of a Round to the next parameters.

Modules, in reading order:

    fold.py          the integer sum: ``begin``, ``accept``, ``merge``, ``finish``
    rules.py         the rules by name: ``Rule`` for sums, ``ColumnRule`` for robust ones, and strategies of Flower
    exact_sums.py    the rule of statistics Runs: integer sums, in which cells of few devices are withheld
    robust           the robust rules: median, MeaMed, Krum, Multi-Krum, Bulyan, RFA, clipping, exact distances
    methods          the rules of FedNova and q-FedAvg, the outer optimizer of FedDyn, and what they need of a Plan
    checked.py       the rule and the optimizer that a Plan names; those of other packages are checked
    sets.py          the fold of a closed set by its rule
    contract.py      the contracts of rules and outer optimizers, as checks for the tests of one's own
    weights.py       how much one Update counts
    folding.py       from a committed Update to the fold, and from the sum to the next parameters
    outer.py         outer optimizers: from the aggregate to the next parameters, with state (FedAvg, momenta, FedAdam)
    auxiliary.py     from the aggregate to the next auxiliary tensors, by the stages
    parameters.py    parameters and auxiliary tensors as blobs and as arrays
    statistics.py    the statistics of a Round
    verify.py        recomputes every Version of a Run
"""
