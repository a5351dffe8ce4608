"""The device side of a coordinator.

Modules, in reading order:

    coordinator.py   ``Coordinator``: one method for each call of a device
    checkins.py      long polls until there is work
    bulletin.py      newer Versions for devices without work
    selection.py     the choice among waiting devices, and retry windows
    downloads.py     Chunks of Bundles and Versions
    uploads.py       one Update from its header to its commit
    validation.py    the checks of an Update's header
    lookup.py        from an Assignment's id to the driver of its Run

One Update passes these seven files on its way from the wire to the fold:

    1. service.py                  decodes the header and the pieces (``Coordinator.upload`` only forwards them)
    2. fleet/uploads.py            checks the header, receives Chunk by Chunk, commits, replies
    3. storage/spool.py            verifies and stores each Chunk, and makes the payload durable
    4. runs/intake.py              accepts the Update for the open Round, and reports it to the round machine
    5. storage/stores.py           commits its row in the database, together with others
    6. rounds/effects.py           ``RoundWork.accumulate``: reads the payload and decodes it, once the machine says so
    7. aggregation/fold.py         ``accept`` adds it to the sum
"""
