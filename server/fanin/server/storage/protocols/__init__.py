"""The Protocols of the stores: a coordinator's requirements for a database, blobs and a spool.

Implement them to keep the state of a coordinator elsewhere (docs/howto/stores.md). ``storage.contracts`` tests an
implementation. Every method that changes the record is one transaction. It succeeds completely or changes nothing, and
its effect is durable when it returns. Every method may be repeated after any error.

Any method may raise, besides the errors that it names:

- ``StorageFull``: no space is left. Nothing was written.
- ``StorageUnavailable``: it cannot be written now for another reason. Nothing was written.
- ``Unavailable``: the store cannot be reached now. The caller repeats the call.
- ``Corrupted``: a stored value does not verify.
- ``OSError``: the disk or the connection failed. The caller repeats the call for a limited time.

Modules:

    runs.py        Bundles, Runs, Versions, events
    rounds.py      Rounds and Updates, as any process reads them
    leases.py      the lease of a Run, and the writes of the driver that holds it
    commands.py    commands of operators
    devices.py     devices, and tokens as calls carry them
    tokens.py      tokens, as administrators manage them, and the audit log
    ledger.py      the privacy ledgers of populations, and the seeds of noise
    evaluations.py evaluations of Versions on held-out data
    retention.py   what retention removes
    history.py     the record in pages, for people
    files.py       blobs and spool
    archive.py     the record of a Run, read for verification
"""
