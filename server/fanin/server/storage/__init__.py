"""The durable state of a coordinator.

Modules, in reading order:

    stores.py        async access to all of it: ``Stores`` (the database) and ``Files`` (blobs and spool)
    lanes.py         threads for blocking work
    commits.py       group commit of Updates
    blobs.py         Chunks of Bundles and Versions
    spool.py         uploads under way, and committed payloads
    disk.py          durable files, and full disks
    sqlite/          the synchronous stores: devices, Runs, Rounds, commands
"""
