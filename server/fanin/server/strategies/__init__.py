"""Strategies of Flower in a process of their own, for the fold of a Round (``aggregation.rules``).

    coordinator: SetFold --> StrategyProcess  ==pipe==>  child: StrategyCalls --> the Strategy

Modules, in reading order:

    process.py   the child process of a Run, seen from the coordinator, and which strategies a coordinator runs
    child.py     the main function of the child
    calls.py     the calls of the strategy in one Round
    records.py   messages and arrays of flwr
    saved.py     the state of a strategy as bytes

Only ``calls``, ``records`` and ``saved`` import flwr, in the child.
"""
