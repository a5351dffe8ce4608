"""One Round: from its first device to its Version.

Modules, in reading order:

    events.py        the vocabulary of the round machine: events and effects
    machine.py       the round machine: the state of a Round, protocols as transition tables, and their diagrams
    endings.py       the rows that every protocol shares
    plain.py         the protocol of a Round without masks
    setup.py         the parts of a Run that never change
    recent.py        the Rounds whose Updates count, and the devices at work
    assignments.py   Assignments and Publications, recognized by their ids
    decision.py      the decision about an Update: receive, accepted, later, discarded or undecided
    opening.py       the next Round, and Rounds after a restart
    effects.py       the effects of one Round, carried out
    worker.py        the queue of effects, and repetition after failures
    troubles.py      which failures are repeated, and what operators read of them
"""
