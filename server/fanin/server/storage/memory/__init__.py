"""The stores in memory: a second implementation of every Protocol, for simulations and tests.

They accept and refuse the same calls as the stores over SQLite (``decisions``) and pass the same contract
(``storage.contracts``). Their state outlives a coordinator that is stopped and started again in one process, and ends
with the process.

All methods run on the event loop, and none of them awaits. So each is a transaction: it raises before its first change,
or it changes everything.

Modules, in reading order:

    database.py    the rows
    runs.py        Bundles, Runs, Versions, events, evaluations of Versions
    rounds.py      Rounds and Updates, to read
    retention.py   what retention removes
    history.py     the record in pages
    writer.py      leases, and the writes of drivers
    commands.py    commands of operators
    administration.py  tokens, and the audit log
    devices.py     devices, and enrollment by their tokens
    ledger.py      the privacy ledgers of populations, and the seeds of noise
    files.py       blobs and the spool
    state.py       all of them, as the state of a coordinator
"""
