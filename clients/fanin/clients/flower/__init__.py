"""Flower apps on a device: a ClientApp or a NumPyClient trains, in a process of its own.

    Assignment --FlowerTrainer--> FlowerTask --FlowerProcess--> child: FlowerApp --> FlowerReply --> Change

Modules, in reading order:

    trainer.py    the Trainer of a Flower app: what travels, what stays, and the checks of what the app returns
    states.py     what an app keeps between Rounds, on the device's disk
    process.py    the child process, which an interruption ends at once
    child.py      the main function of the child
    app.py        the app itself; the only module that imports flwr
    initial.py    the initial arrays that a command line names
    task.py       what goes to the app and what comes back
"""
