"""The contracts of the stores, as checks for the tests of an implementation (docs/howto/stores.md).

Each check uses an empty store. It raises AssertionError with a description of the fault.

Modules, in reading order:

    values.py      small records to store
    devices.py     ``check_devices``
    tokens.py      tokens, and the audit log
    files.py       ``check_blobs`` and ``check_spool``
    runs.py        Bundles, Runs, Versions, events, evaluations of Versions on held-out data
    rounds.py      the writes of a driver
    leases.py      two drivers of one Run
    commands.py    commands of operators
    ledger.py      privacy ledgers
    history.py     the record in pages
    retention.py   what retention removes
    databases.py   ``check_stores``: all of a database's stores
"""
