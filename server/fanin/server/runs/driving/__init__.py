"""The drivers of Runs: a Run with a driver opens one Round after another.

Modules, in reading order:

    drivers.py       the drivers of a coordinator, and why it does not drive the other Runs
    driver.py        ``RunDriver``: carries out effects and opens one Round after another
    course.py        the state of one Run in memory
    commands.py      commands to one Run: pause, resume, stop, adopt, publish
    intake.py        the check-ins of the devices of one Run
    updates.py       the Updates of the devices of one Run: decided, committed, refused and given up
    absences.py      the expected devices of a Run, and its alarms
    participants.py  the required participants among the enrolled devices, and the coverage of a Round
    ranges.py        the ranges of the tensors of one device
    shortage.py      why an open Round waits for devices
    stopping.py      when a Run rests
    warnings.py      what an operator should look at while a Run continues
"""
