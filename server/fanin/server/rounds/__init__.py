"""One Round: from its first device to its Version.

Modules, in reading order:

    events.py        the vocabulary of the round machine: events and effects
    machine.py       the round machine: the state of a Round, and protocols as transition tables
    endings.py       the rows that every protocol shares
    plain.py         the protocol of a Round without masks
    diagram.py       the state diagram of a protocol
    setup.py         the parts of a Run that never change
    recent.py        the Rounds whose Updates count, and the devices at work
    assignments.py   Assignments and Publications, recognized by their ids
    opening.py       the next Round, and Rounds after a restart
    effects.py       the effects of one Round, carried out
    worker.py        the queue of effects, and repetition after failures
    troubles.py      which failures are repeated, and what operators read of them
"""
