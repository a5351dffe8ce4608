"""The selection of waiting devices for the free places of a Round.

Modules, in reading order:

    policies.py       the policies by name: ``uniform``, ``least_recent``, and those of other distributions
    coins.py          the coins of private Runs with sampling
    contract.py       the contract of policies, as a check for the tests of one's own
    participation.py  the last Round of each device
    presence.py       the devices at work that still answer, and those that make progress
    absence.py        alarms about devices that an operator expects
    coverage.py       the required participants that a Round lacks
    standing.py       pauses of devices, and the devices that are selected last
"""
