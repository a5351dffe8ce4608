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
- ``devices/``: models of devices
- ``experiment``: ``simulate``, from an App to a ``Result``; ``arguments``: their checks; ``preparation``: its Bundle
- ``simulated_run``: its Run; ``progress``: its output; ``host``: its process
- ``trainers``: the trainers of its clients; ``workers``: their trainings by graphs; ``flower``: those of a Flower app
- ``backends/``: where the trainings run, in this process or in others
- ``engines/``: the choice of the engine, and ``vmap``
- ``result``, ``rows``: the tables of a simulation, and its event log
- ``after/``: what follows the last Round: the evaluation by each client, and the baseline
- ``studies/``: seeds, a baseline, figures, and simulations that resume
- ``queries/``: ``simulate_statistics``, the statistics of simulated clients
- ``grids/``: ``Study``, a grid of Plans for several methods and seeds
- ``federation/``: a coordinator with its devices on a virtual clock, and ``play``, one Run from a ``Scenario``
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
    from fanin.simulation.devices.attackers import Attackers
    from fanin.simulation.devices.attacks import (
        Alie,
        Attack,
        Backdoor,
        GridManipulation,
        HonestUpdates,
        InnerProduct,
        LabelFlip,
        Scaling,
        SignFlip,
    )
    from fanin.simulation.devices.availability import Availability, Battery, DailyWindow, OnOff, Rate, Trace
    from fanin.simulation.devices.distributions import Distribution, Fixed, Lognormal, Pareto, Uniform
    from fanin.simulation.devices.files import read_devices
    from fanin.simulation.devices.habits import Habits, Lie
    from fanin.simulation.devices.models import DeviceModel
    from fanin.simulation.devices.traces import DeviceTrace, Traces, read_traces
    from fanin.simulation.devices.work import ClientWork
    from fanin.simulation.experiment import simulate
    from fanin.simulation.federation.clock import run_virtual
    from fanin.simulation.federation.device import VirtualDevice
    from fanin.simulation.federation.federation import Federation
    from fanin.simulation.federation.loopback import Fleet, LoopbackTransport
    from fanin.simulation.federation.member import Member
    from fanin.simulation.federation.scenario import Outcome, Scenario, play
    from fanin.simulation.federation.synthetic import SyntheticTrainer, synthetic_bundle
    from fanin.simulation.grids.results import StudyResult
    from fanin.simulation.grids.study import Method, Study, StudyData
    from fanin.simulation.queries.simulated import simulate_statistics
    from fanin.simulation.result import BestVersion, ClientFailed, KeptVersion, Result, RunStopped
    from fanin.simulation.rows import ClientFailure, ClientRow, RoundRow, SimulationEvent
    from fanin.simulation.settings import SimulationSettings
    from fanin.simulation.studies.baseline import BaselineRow
    from fanin.simulation.studies.comparison import PlotForm, plot_results
    from fanin.simulation.studies.per_client import ClientQuality, QualitySummary
    from fanin.simulation.studies.seeds import SpreadRow

_MODULES = {
    "Alie": "devices.attacks",
    "Attack": "devices.attacks",
    "Attackers": "devices.attackers",
    "Availability": "devices.availability",
    "Backdoor": "devices.attacks",
    "BaselineRow": "studies.baseline",
    "Battery": "devices.availability",
    "BestVersion": "result",
    "ClientFailed": "result",
    "ClientFailure": "rows",
    "ClientRow": "rows",
    "DailyWindow": "devices.availability",
    "ClientQuality": "studies.per_client",
    "ClientWork": "devices.work",
    "DeviceModel": "devices.models",
    "DeviceTrace": "devices.traces",
    "Dirichlet": "data.partitioners",
    "Distribution": "devices.distributions",
    "FeatureSkew": "data.partitioners",
    "Federation": "federation.federation",
    "Fixed": "devices.distributions",
    "Fleet": "federation.loopback",
    "GridManipulation": "devices.attacks",
    "Habits": "devices.habits",
    "HonestUpdates": "devices.attacks",
    "Iid": "data.partitioners",
    "InnerProduct": "devices.attacks",
    "LabelFlip": "devices.attacks",
    "KeptVersion": "result",
    "LabelSkew": "data.partitioners",
    "Lie": "devices.habits",
    "LoadedData": "data.loading",
    "Lognormal": "devices.distributions",
    "LoopbackTransport": "federation.loopback",
    "Member": "federation.member",
    "Method": "grids.study",
    "Natural": "data.partitioners",
    "OnOff": "devices.availability",
    "Outcome": "federation.scenario",
    "Pareto": "devices.distributions",
    "Partition": "data.partitioning",
    "Partitioner": "data.partitioners",
    "PlotForm": "studies.comparison",
    "Pathological": "data.partitioners",
    "QualitySummary": "studies.per_client",
    "Quantity": "data.partitioners",
    "Rate": "devices.availability",
    "RayCluster": "backends.ray_cluster",
    "Result": "result",
    "RoundRow": "rows",
    "RunStopped": "result",
    "Scaling": "devices.attacks",
    "Scenario": "federation.scenario",
    "Shards": "data.partitioners",
    "SignFlip": "devices.attacks",
    "SimulationEvent": "rows",
    "SimulationSettings": "settings",
    "SpreadRow": "studies.seeds",
    "Study": "grids.study",
    "StudyData": "grids.study",
    "StudyResult": "grids.results",
    "SyntheticTrainer": "federation.synthetic",
    "Trace": "devices.availability",
    "Traces": "devices.traces",
    "Uniform": "devices.distributions",
    "VirtualDevice": "federation.device",
    "examples_of": "data.loading",
    "load_data": "data.loading",
    "partition": "data.partitioning",
    "partition_of": "data.loading",
    "play": "federation.scenario",
    "plot_results": "studies.comparison",
    "read_devices": "devices.files",
    "read_traces": "devices.traces",
    "run_virtual": "federation.clock",
    "simulate": "experiment",
    "simulate_statistics": "queries.simulated",
    "synthetic_bundle": "federation.synthetic",
}
__all__ = [
    "Alie",
    "Attack",
    "Attackers",
    "Availability",
    "Backdoor",
    "BaselineRow",
    "Battery",
    "BestVersion",
    "ClientFailed",
    "ClientFailure",
    "ClientQuality",
    "ClientRow",
    "ClientWork",
    "DailyWindow",
    "DeviceModel",
    "DeviceTrace",
    "Dirichlet",
    "Distribution",
    "FeatureSkew",
    "Federation",
    "Fixed",
    "Fleet",
    "GridManipulation",
    "Habits",
    "HonestUpdates",
    "Iid",
    "InnerProduct",
    "KeptVersion",
    "LabelFlip",
    "LabelSkew",
    "Lie",
    "LoadedData",
    "Lognormal",
    "LoopbackTransport",
    "Member",
    "Method",
    "Natural",
    "OnOff",
    "Outcome",
    "Pareto",
    "Partition",
    "Partitioner",
    "Pathological",
    "PlotForm",
    "QualitySummary",
    "Quantity",
    "Rate",
    "RayCluster",
    "Result",
    "RoundRow",
    "RunStopped",
    "Scaling",
    "Scenario",
    "Shards",
    "SignFlip",
    "SimulationEvent",
    "SimulationSettings",
    "SpreadRow",
    "Study",
    "StudyData",
    "StudyResult",
    "SyntheticTrainer",
    "Trace",
    "Traces",
    "Uniform",
    "VirtualDevice",
    "examples_of",
    "load_data",
    "partition",
    "partition_of",
    "play",
    "plot_results",
    "read_devices",
    "read_traces",
    "run_virtual",
    "simulate",
    "simulate_statistics",
    "synthetic_bundle",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
