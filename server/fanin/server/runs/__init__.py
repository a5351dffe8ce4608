"""The operator side of a coordinator: Runs and their drivers.

Modules, in reading order:

    view.py          the Run as any replica reads it
    catalog.py       ``Runs``: one method for each call of an operator
    recorded_setup.py  the setup of a Run from its record
    admission.py     the checks of what operators publish
    measuring.py     the checks of Plans that train nothing: statistics, and evaluations
    data.py          the data sets that a Plan may name, for evaluations and for ranges of activations
    driving/         the drivers of Runs, which carry out effects and open Rounds
    validation.py    the checks of an Update's header against its Assignment
    publications.py  Versions for devices without an Assignment
    suitability.py   whether a device can take part
    populations.py   privacy ledgers for people, and charges for lost intervals
    stream.py        events and Rounds under way, for ``fanin watch`` and the page
    describe.py      the description of a Run for operators
"""
