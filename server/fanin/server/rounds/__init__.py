"""One Round: from its first device to its Version. ``protocols`` has its machine.

Modules, in reading order:

    setup.py         the parts of a Run that never change
    recent.py        the Rounds whose Updates count, and the devices at work
    assignments.py   Assignments and Publications, recognized by their ids
    decision.py      the decision about an Update: receive, accepted, later, discarded or undecided
    opening.py       the next Round, and Rounds after a restart
    effects.py       the effects of one Round, carried out
    messages.py      the messages of its phases, recorded and answered
    charging.py      the budget of a Run with privacy, and the seed of the noise of a Round
    targets.py       the end of a Run whose Version has reached the target of its Plan, or whose budget is spent
    reported.py      the facts of a committed Update
    worker.py        the queue of effects, and repetition after failures
    troubles.py      which failures are repeated, and what operators read of them
"""
