"""The synchronous stores: all durable state except bulk bytes, in one SQL database.

Every public method of a store is one transaction, over SQLAlchemy Core. Modules, in reading order:

    schema.py        the tables
    migrations/      the versions of the schema (Alembic)
    engine.py        opens and migrates the database
    records.py       protobuf messages in columns
    devices.py       devices and tokens
    population.py    all enrolled devices in memory
    runs.py          Bundles, Runs, Versions, events
    rounds.py        Rounds and committed Updates
    commands.py      commands of operators
    outer_states.py  the states of outer optimizers
    grids.py         the grid and the outer state that a Round starts on
"""
