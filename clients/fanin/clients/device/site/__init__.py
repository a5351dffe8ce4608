"""What the owner of a device sees of it, without an operator's token: its state in a file of its folder, and as a page.

Reading order:

- ``record``: the state as a JSON file, ``status.json``
- ``leaving``: what leaves the machine, generated from the messages and the Assignment, and what never does
- ``journal``: writes the file while the device runs
- ``attempt``: the same for a failure before the client runs
- ``privacy``: the floor in force, and the ledger of the device
- ``view``: reads the file, also of a device that is stopped; its text
- ``page``: the same as a local web page, ``page.html``
"""
