"""The stores over SQLite: all durable state except bulk bytes, in one database.

Every public method of a store is one transaction, over SQLAlchemy Core. Only ``server.folder`` imports this room; the
other rooms see ``storage.protocols``. Modules, in reading order:

    schema.py        the tables, and protobuf messages in columns
    migrations/      the versions of the schema (Alembic)
    engine.py        opens and migrates the database
    administration.py  tokens, and the audit log
    devices.py       devices, and enrollment by their tokens
    runs.py          Bundles, Runs, Versions, events, and what retention removed of them
    rounds.py        Rounds and committed Updates, to read; the states of outer optimizers
    messages.py      the messages of the phases of Rounds, and their rosters
    ledger/          the privacy ledgers of populations, and the seeds of noise
    care.py          what retention removes, snapshots for backups, and the marks of a restored one
    history.py       the record in pages, and evaluations of Versions
    writer.py        leases, and the writes of drivers
    commands.py      commands of operators
    laned.py         the async stores: each of these on the store lane, and the group commit of Updates
"""
