"""Models of simulated devices: how fast they are, how they are connected, and when they are there.

    devices = DeviceModel(examples_per_s=Lognormal(median=50.0, sigma=1.0), dropout=0.1)
    simulate(app, clients, cohort=10, rounds=20, settings=SimulationSettings(devices=devices))

A model becomes the ``Habits`` of each client, so the devices of ``simulate`` and those of ``play`` are the same ones.

Reading order:

- ``distributions``: numbers that differ between devices
- ``models``: ``DeviceModel``, and the habits of each client
- ``files``: models in TOML, and traces of presence
- ``rotation``: ``Rotation``, more clients than are present at a time
- ``events``: the event log of a simulation
"""
