"""The durable state of a coordinator.

Modules, in reading order:

    records.py       the records that pass through the stores
    protocols/       the Protocols of the stores: devices, tokens, Runs, Rounds, leases, commands, blobs, spool
    stores.py        what the other rooms hold: ``Stores`` (the database) and ``Files`` (blobs and spool)
    decisions.py     which writes and commands a store accepts
    access.py        which changes of tokens and devices a store accepts
    origins.py       the grid and the outer state that a Round starts on
    population.py    all enrolled devices in memory
    lanes.py         threads for blocking work
    durations.py     durations of an operation, counted by bounds
    blobs.py         Chunks of Bundles and Versions in a folder
    retention.py     what retention removes: the decision
    collector.py     the removal of Chunks and keys that nothing uses
    spool.py         uploads under way and committed payloads in a folder
    disk.py          durable files, and full disks
    sqlite/          the stores over SQLite
    memory/          the stores in memory, for simulations and tests
    contracts/       the tests that an implementation of the Protocols passes
"""
