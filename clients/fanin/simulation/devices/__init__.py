"""Models of simulated devices: their speed, their connection, and their availability.

    devices = DeviceModel(examples_per_s=Lognormal(median=50.0, sigma=1.0), dropout=0.1)
    simulate(app, clients, cohort=10, rounds=20, settings=SimulationSettings(devices=devices))

A model becomes the ``Habits`` of each client, so ``simulate`` and ``play`` use the same devices.

Reading order:

- ``availability``: patterns of presence, a battery, and rates that change over time
- ``attacks``: malicious Updates and data, to evaluate aggregation rules; ``attackers``: the clients that attack
- ``habits``: ``Habits``, the fault model of a device, drawn from a seed
- ``conduct``: the change that a device sends: its own, or that of its attack
- ``distributions``: numbers that differ between devices
- ``traces``: recorded devices in CSV, Parquet or JSON lines
- ``models``: ``DeviceModel``, and the habits of each client
- ``work``: the epochs or steps of each client, and stragglers
- ``files``: models in TOML
"""
