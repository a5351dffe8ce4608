"""The device side of a coordinator.

Modules, in reading order:

    coordinator.py   ``Coordinator``: one method for each call of a device
    checkins.py      long polls until there is work
    bulletin.py      newer Versions for devices without work
    retries.py       retry windows of devices without a place
    doubles.py       devices whose key is online twice
    downloads.py     Chunks of Bundles and Versions
    uploads.py       one Update from its header to its last Chunk
    acceptance.py    the fate of a complete upload
    validation.py    the checks of an Update's header
    lookup.py        from an Assignment's id to the driver of its Run

An Update passes these files on its way from the wire to the sum:

    1. service.py              decodes the header and the pieces (``Coordinator.upload`` only forwards them)
    2. fleet/uploads.py        receives Chunk by Chunk and replies; it calls the files of steps 3, 4 and 5
    3. fleet/validation.py     checks the header against the Assignment, before a Chunk is received
    4. storage/spool.py        verifies each Chunk
    5. fleet/acceptance.py     decides the fate of the complete upload: the spool makes its payload durable, then step 6
    6. runs/driving/intake.py  commits the Update through the writer of the lease, then reports it to the round machine
    7. rounds/worker.py        runs the effect of the machine; runs/driving/driver.py maps it to a method
    8. rounds/effects.py       ``RoundWork.accumulate`` reads the payload
    9. aggregation/folding.py  ``contribution_of`` decodes it and computes its weights
    10. aggregation/fold.py    ``accept`` multiplies it by the weight and adds it to the sum
"""
