"""Models of simulated devices: their speed, their connection, and their availability.

    devices = DeviceModel(examples_per_s=Lognormal(median=50.0, sigma=1.0), dropout=0.1)
    simulate(app, clients, cohort=10, rounds=20, settings=SimulationSettings(devices=devices))

A model becomes the ``Habits`` of each client, so ``simulate`` and ``play`` use the same devices.

Reading order:

- ``distributions``: numbers that differ between devices
- ``traces``: recorded devices in CSV, Parquet or JSON lines
- ``models``: ``DeviceModel``, and the habits of each client
- ``files``: models in TOML
- ``rotation``: ``Rotation``, more clients than are present at a time
- ``events``: the event log of a simulation
"""
