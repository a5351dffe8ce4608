"""Flower apps on a device: a ClientApp or a NumPyClient trains in a separate process.

    Assignment --FlowerTrainer--> FlowerTask --FlowerProcess--> child: FlowerApp --> FlowerReply --> Change

Modules, in reading order:

    trainer.py    the Trainer of a Flower app: sent values, local values, and the checks of the app's results
    states.py     the state of an app between Rounds, on the device's disk
    process.py    the child process, which an interruption ends at once
    child.py      the main function of the child
    app.py        the app itself; this module and servers.py import flwr
    servers.py    the initial arrays of a ServerApp
    project.py    the pyproject.toml of an app: its name and its configuration
    mods.py        the mods of an app that fanin does not support
    generators.py  the global random generators that the app draws from
    initial.py    the initial arrays that a command line names
    task.py       the tasks and replies of the app
"""
