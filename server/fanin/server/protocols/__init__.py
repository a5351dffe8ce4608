"""Round protocols: the machine of a Round, and the tables that lead it from its first device to its Version.

Modules, in reading order:

    phases.py      phases and their flags, the messages of a phase, and the facts that answer them
    events.py      the vocabulary of the machine: events and effects
    machine.py     the state of a Round, protocols as transition tables, and their diagrams
    endings.py     the rows that every protocol shares
    plain.py       the protocol of a Round without messages
    exchanging.py  protocols with messages before and after the training
    facts.py       the facts about the messages of a Round, from its record
    requirements.py  what rosters and masks need of a Plan
    secagg.py      secure aggregation: masks that cancel in the sum
    known.py       the protocol that a Plan names
"""
