"""Federations on one machine: the production coordinator and devices in one process, on a virtual clock.

    clients = partition(data, 100, Dirichlet(alpha=0.3))            # the examples of each client
    result = simulate(app, clients, cohort=10, rounds=20)           # train a torch module on them
    outcome = play(scenario, folder)                                # a Run with faults: the same bits, the same log
    async with Federation(folder, seed=0) as federation: ...        # step by step, inside ``run_virtual``

The simulation composes ``fanin.server`` and ``fanin.clients`` through the Protocol ``Fleet``. Clock, network and
threads are replaced. All other code is production code (docs/howto/simulate.md). The names in ``__all__`` are public,
and their modules are imported when a name is first used.

Reading order:

- ``data/``: data sets, and the examples of each client
- ``settings``: ``SimulationSettings``, the options of ``simulate``
- ``setup/``: its arguments and its output
- ``devices/``: models of devices, and the event log
- ``experiment``: ``simulate``, from an App to a ``Result``; ``course``: its Run
- ``trainers``: the trainers of its clients; ``workers``: their trainings by graphs; ``flower``: those of a Flower app
- ``backends/``: where the trainings run, in this process or in others
- ``engines/``: the choice of the engine, and ``vmap``
- ``result``, ``rows``: the tables of a simulation
- ``studies/``: seeds, a baseline, figures, and simulations that resume
- ``scenario``: ``play``, one Run from a ``Scenario`` to its ``Outcome``
- ``federation``: ``Federation``, a coordinator with its devices
- ``coordinator``: one coordinator that can stop and start again
- ``operator``: the calls of an operator, without a network
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fanin.simulation.backends.ray_cluster import RayCluster
    from fanin.simulation.data.loading import LoadedData, examples_of, load_data, partition_of
    from fanin.simulation.data.partitioners import (
        Dirichlet,
        FeatureSkew,
        Iid,
        LabelSkew,
        Natural,
        Partitioner,
        Pathological,
        Quantity,
        Shards,
    )
    from fanin.simulation.data.partitioning import Partition, partition
    from fanin.simulation.devices.distributions import Distribution, Fixed, Lognormal, Pareto, Uniform
    from fanin.simulation.devices.events import SimulationEvent
    from fanin.simulation.devices.files import read_devices
    from fanin.simulation.devices.models import DeviceModel
    from fanin.simulation.devices.traces import DeviceTrace, Traces, read_traces
    from fanin.simulation.experiment import simulate
    from fanin.simulation.federation import Federation
    from fanin.simulation.result import BestVersion, ClientFailed, Result, RunStopped
    from fanin.simulation.rows import ClientFailure, ClientRow, RoundRow
    from fanin.simulation.scenario import Outcome, Scenario, play
    from fanin.simulation.settings import SimulationSettings
    from fanin.simulation.studies.baseline import BaselineRow
    from fanin.simulation.studies.plots import plot_results
    from fanin.simulation.studies.seeds import SpreadRow

_MODULES = {
    "BestVersion": "result",
    "BaselineRow": "studies.baseline",
    "SpreadRow": "studies.seeds",
    "DeviceModel": "devices.models",
    "DeviceTrace": "devices.traces",
    "Traces": "devices.traces",
    "Distribution": "devices.distributions",
    "Fixed": "devices.distributions",
    "Lognormal": "devices.distributions",
    "Pareto": "devices.distributions",
    "Uniform": "devices.distributions",
    "SimulationEvent": "devices.events",
    "read_devices": "devices.files",
    "read_traces": "devices.traces",
    "ClientFailed": "result",
    "ClientFailure": "rows",
    "ClientRow": "rows",
    "LoadedData": "data.loading",
    "Dirichlet": "data.partitioners",
    "FeatureSkew": "data.partitioners",
    "Federation": "federation",
    "Iid": "data.partitioners",
    "LabelSkew": "data.partitioners",
    "Natural": "data.partitioners",
    "Outcome": "scenario",
    "Partition": "data.partitioning",
    "Partitioner": "data.partitioners",
    "Pathological": "data.partitioners",
    "Quantity": "data.partitioners",
    "RayCluster": "backends.ray_cluster",
    "Result": "result",
    "RoundRow": "rows",
    "RunStopped": "result",
    "Scenario": "scenario",
    "Shards": "data.partitioners",
    "SimulationSettings": "settings",
    "examples_of": "data.loading",
    "load_data": "data.loading",
    "partition": "data.partitioning",
    "partition_of": "data.loading",
    "play": "scenario",
    "plot_results": "studies.plots",
    "simulate": "experiment",
}
__all__ = [
    "BaselineRow",
    "BestVersion",
    "ClientFailed",
    "ClientFailure",
    "ClientRow",
    "DeviceModel",
    "DeviceTrace",
    "Dirichlet",
    "Distribution",
    "FeatureSkew",
    "Federation",
    "Fixed",
    "Iid",
    "LabelSkew",
    "LoadedData",
    "Lognormal",
    "Natural",
    "Outcome",
    "Pareto",
    "Partition",
    "Partitioner",
    "Pathological",
    "Quantity",
    "RayCluster",
    "Result",
    "RoundRow",
    "RunStopped",
    "Scenario",
    "Shards",
    "SimulationEvent",
    "SimulationSettings",
    "SpreadRow",
    "Traces",
    "Uniform",
    "examples_of",
    "load_data",
    "partition",
    "partition_of",
    "play",
    "plot_results",
    "read_devices",
    "read_traces",
    "simulate",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
