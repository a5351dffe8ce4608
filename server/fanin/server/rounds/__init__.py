"""One Round: from its first device to its Version.

Modules, in reading order:

    events.py        the vocabulary of the round machine: events and effects
    machine.py       the round machine, as a transition table
    diagram.py       the state diagram of that table
    setup.py         the parts of a Run that never change
    recent.py        the Rounds whose Updates count, and the devices at work
    assignments.py   Assignments and Publications, recognized by their ids
    opening.py       the next Round, and Rounds after a restart
    effects.py       the effects of one Round, carried out
    worker.py        the queue of effects, and repetition after failures
    troubles.py      which failures are repeated, and what operators read of them
"""
