"""The device side of a coordinator.

Modules, in reading order:

    servicer.py      the calls of the wire
    coordinator.py   ``Coordinator``: one method for each call of a device
    checkins.py      long polls until there is work; devices whose key is online twice
    activity.py      the last check-ins of devices, for the record
    bulletin.py      newer Versions for devices without work
    retries.py       retry windows of devices without a place
    downloads.py     Chunks of Bundles and Versions
    uploads.py       one Update from its header to its last Chunk
    payloads.py      one masked payload for each Assignment
    exchanges.py     the messages of devices and coordinator in a phase of a Round
    observer.py      what metrics and traces see of these calls

An Update passes these files on its way from the wire to the sum:

    1. fleet/servicer.py       decodes the header and the pieces (``Coordinator.upload`` is ``Uploads.upload``)
    2. fleet/uploads.py        receives Chunk by Chunk and replies; it calls the files of steps 3 and 4
    3. runs/driving/updates.py ``admit`` before the first Chunk, ``commit`` after the last one. Both decide by the facts
                               of the Round (``Course.facts``, ``rounds/decision.py``). ``admit`` also compares the
                               header with its Assignment (``runs/validation.py``)
    4. storage/spool.py        verifies each Chunk, and makes the complete payload durable
    5. storage/sqlite/         ``writer.py`` commits the Update by the lease of the driver; ``runs/driving/updates.py``
                               then reports it to the round machine
    6. rounds/worker.py        runs the effect of the machine; runs/driving/driver.py maps it to a method
    7. rounds/effects.py       ``RoundWork.accumulate`` reads the payload
    8. aggregation/folding.py  ``SpooledUpdates.contribution`` decodes it and computes its weights
    9. aggregation/fold.py     ``accept`` multiplies it by the weight and adds it to the sum

``tests/house/test_way_of_an_update.py`` counts the files of steps 1 to 5.
"""
