"""Flower strategies for tests, as source text, and a Run of them with devices whose changes are given."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from fanin.clients.device.updates import Change, make_update
from fanin.edge.bundles.arrays import write_arrays
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos import messages as m
from fanin.protos.plans import FlowerPlan, Plan
from fanin.server.access.limits import Limits
from fanin.server.aggregation.parameters import load_parameters
from fanin.server.fleet.coordinator import Coordinator
from fanin.server.folder import open_state
from fanin.server.rounds.worker import LogObserver
from fanin.server.runs.catalog import Runs
from fanin.server.runs.recorded_setup import Parts
from fanin.server.storage.disk import Durability
from fanin.server.storage.lanes import inline
from fanin.server.strategies.process import Strategies
from fanin.simulation import LoopbackTransport
from support.staleness import CAPABILITIES, settle
from support.virtual import PUBLISHER, Place, plan, start

SOURCE: Final = '''
import asyncio
import os
import time

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedMedian,
    FedXgbBagging,
    Strategy,
)


class Own(Strategy):
    """The mean of the arrays, in which each device counts the same, plus the number of Rounds so far."""

    def __init__(self, step: float = 0.0):
        self.step = step
        self.past = {"rounds": 0, "seen": (1, {2.5}), "last": np.float32(0)}

    def summary(self):
        pass

    def configure_train(self, server_round, arrays, config, grid):
        return [self._message(arrays, config, node, MessageType.TRAIN) for node in grid.get_node_ids()]

    def configure_evaluate(self, server_round, arrays, config, grid):
        return [self._message(arrays, config, node, MessageType.EVALUATE) for node in grid.get_node_ids()]

    def aggregate_train(self, server_round, replies):
        total, number = {}, 0
        for reply in replies:
            number += 1
            for name, array in reply.content["arrays"].items():
                total[name] = total.get(name, 0) + array.numpy().astype("float64")
        self.past["rounds"] += 1
        means = {name: Array(value / number + self.step * self.past["rounds"]) for name, value in total.items()}
        return ArrayRecord(means), MetricRecord({"replies": number, "text": [1.0]})

    def aggregate_evaluate(self, server_round, replies):
        return MetricRecord({"round": server_round, "acc": max(each.content["metrics"]["acc"] for each in replies)})

    def _message(self, arrays, config, node, kind):
        return Message(RecordDict({"arrays": arrays, "config": config}), dst_node_id=node, message_type=kind)


class Wrong(Own):
    """An own strategy whose result is changed."""

    def change(self, arrays):
        return arrays

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        return self.change(arrays), metrics


class ReturnsNone(Own):
    def aggregate_train(self, server_round, replies):
        return None, None


class ReturnsNothing(Own):
    def aggregate_train(self, server_round, replies):
        pass


class MoreArrays(Wrong):
    def change(self, arrays):
        arrays["tree"] = Array(np.zeros(3, "float32"))
        return arrays


class OtherShapes(Wrong):
    def change(self, arrays):
        arrays["b"] = Array(np.zeros(3, "float32"))
        return arrays


class Integers(Wrong):
    def change(self, arrays):
        arrays["b"] = Array(np.zeros(2, "int64"))
        return arrays


class NotFinite(Wrong):
    def change(self, arrays):
        arrays["b"] = Array(np.array([1.0, np.nan]))
        return arrays


class TooLarge(Wrong):
    def change(self, arrays):
        arrays["b"] = Array(np.array([1.0, 1e300]))
        return arrays


class NoRecord(Wrong):
    def change(self, arrays):
        return [array.numpy() for array in arrays.values()]


class Raises(Own):
    def aggregate_train(self, server_round, replies):
        raise FileNotFoundError(2, "no such file", "/etc/secret")


class Leaves(Own):
    def aggregate_train(self, server_round, replies):
        raise SystemExit("enough")


class Crashes(Own):
    def aggregate_train(self, server_round, replies):
        os._exit(7)


class Blocks(Own):
    def aggregate_train(self, server_round, replies):
        time.sleep(600)


class Indexes(Own):
    def aggregate_train(self, server_round, replies):
        return super().aggregate_train(server_round, [replies[0]])


class OtherConfig(Own):
    def configure_train(self, server_round, arrays, config, grid):
        config["proximal-mu"] = 0.5
        return super().configure_train(server_round, arrays, config, grid)


class Numbered(Own):
    def configure_train(self, server_round, arrays, config, grid):
        config["server_round"] = config["current_round"] = server_round
        return super().configure_train(server_round, arrays, config, grid)


class OtherNumber(Own):
    def configure_train(self, server_round, arrays, config, grid):
        config["server_round"] = server_round + 1
        return super().configure_train(server_round, arrays, config, grid)


class OtherArrays(Own):
    def configure_train(self, server_round, arrays, config, grid):
        smaller = ArrayRecord({name: Array(array.numpy() / 2) for name, array in arrays.items()})
        return super().configure_train(server_round, smaller, config, grid)


class Sends(Own):
    def configure_train(self, server_round, arrays, config, grid):
        return grid.send_and_receive([])


class Skips(Own):
    def configure_train(self, server_round, arrays, config, grid):
        return []


class Opaque(Own):
    """A strategy with an attribute that has no plain form."""

    def __init__(self):
        super().__init__(step=1.0)
        self.numbers = iter(range(100))

    def aggregate_train(self, server_round, replies):
        assert next(self.numbers) == self.past["rounds"]
        return super().aggregate_train(server_round, replies)


class Portable(Opaque):
    """The same with a state of its own."""

    def __getstate__(self):
        return {"rounds": self.past["rounds"], "arrays": [np.arange(3)]}

    def __setstate__(self, state):
        assert state["arrays"][0].tolist() == [0, 1, 2]
        self.past["rounds"] = state["rounds"]
        self.numbers = iter(range(state["rounds"], 100))


class Forgetful(Own):
    """Not pure: it depends on the process."""

    def aggregate_train(self, server_round, replies):
        self.step = os.getpid() / 1e6
        return super().aggregate_train(server_round, replies)


def noisy():
    return DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 1.0, 3)


def clipping():
    return DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.1, 1.0, 3)


class Bagging(FedXgbBagging):
    pass


class Wrapped(FedMedian):
    """A strategy with another one inside."""

    def __init__(self):
        super().__init__()
        self.inner = Own(step=0.5)

    def aggregate_train(self, server_round, replies):
        return self.inner.aggregate_train(server_round, replies)


NOTES = []


class Notes(Own):
    """An own strategy that notes when it reads."""

    def aggregate_train(self, server_round, replies):
        NOTES.append("begin")
        return super().aggregate_train(server_round, (self._noted(reply) for reply in replies))

    def _noted(self, reply):
        NOTES.append("read")
        return reply


ready = Own(step=2.0)
number = 3
'''
MODULE: Final = "own_strategies"
NAMES: Final = ("b", "norm.running_mean", "w")
INITIAL: Final = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3) / 8,
    "norm.running_mean": np.array([0.5, -0.5], np.float32),
    "b": np.ones(2, np.float32),
}
TABLE: Final = TensorTable.of({name: value.shape for name, value in INITIAL.items()})
EXAMPLES: Final = (10, 30, 20)
Values = Mapping[str, Float32s]


def write_strategies(folder: Path) -> Path:
    """Write the module of the strategies into a folder, and return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / f"{MODULE}.py").write_text(SOURCE)
    return folder


def strategy_plan(name: str, *, max_rounds: int = 9, **keys: object) -> Plan:
    """Return a Plan of three devices with a strategy: one of the module, or one of flwr."""
    where = name if ":" in name else f"{MODULE}:{name}"
    statistics = (m.Statistic(name="evaluate.acc", bound=1 << 40), m.Statistic(name="train.gain", bound=1 << 40))
    first = plan(concurrency=3, buffer=3, quorum=3, max_rounds=max_rounds)
    return replace(first, flower=FlowerPlan(strategy=where, **keys), statistics=statistics)  # type: ignore[arg-type]


def open_strategies(folder: Path, allowed: tuple[str, ...] | None = None) -> Place:
    """Return a coordinator that runs the strategies of the module, all of them by default."""
    clock = asyncio.get_running_loop().time
    state = open_state(folder / "state", Durability.PROCESS, (inline, inline), clock)
    strategies = Strategies(write_strategies(folder / "strategies"), allowed)
    runs = Runs(state.stores, state.files, LogObserver(), Parts(strategies=strategies))
    return Place(
        state=state,
        runs=runs,
        coordinator=Coordinator(runs, state.stores, state.files, Limits(), random.Random(0)),
    )


async def begin(place: Place, folder: Path, run_plan: Plan) -> None:
    """Start a Run of the initial arrays."""
    bundle = write_arrays(INITIAL, folder / "bundle", PUBLISHER, "arrays")
    await start(place.runs, bundle, run_plan)
    await settle()


def changes_in(round_number: int) -> list[Float32s]:
    """Return the change of each device in a Round (num_values,): whole steps of 2^-20, which each grid has."""
    rng = np.random.default_rng(round_number)
    return [(rng.integers(-(1 << 19), 1 << 19, TABLE.num_values) / (1 << 20)).astype(np.float32) for _ in EXAMPLES]


async def take_round(place: Place, round_number: int) -> None:
    """Let the three devices send their Updates, in an order that differs from Round to Round."""
    capabilities = replace(CAPABILITIES, graph_formats=("arrays",))
    numbers = [(round_number + index) % len(EXAMPLES) for index in range(len(EXAMPLES))]
    for index in numbers:
        device = f"device-{index}"
        check_in = m.CheckIn(protocol=m.PROTOCOL, capabilities=capabilities, wait_s=0.1)
        answer = await place.coordinator.check_in(device, check_in)
        assert isinstance(answer, m.Assigned), answer
        assert answer.assignment.flower == FlowerPlan(), "a device reads nothing of the strategy"
        counts = {m.EXAMPLES: EXAMPLES[index], "train.gain": EXAMPLES[index] * (1 << 14)}
        counts |= {m.EVAL_EXAMPLES: 4, m.EVAL_LOSS: 0, "evaluate.acc": 4 * (index << 16)}
        change = Change(values=changes_in(round_number)[index], counts=counts)
        header, payload = make_update(answer.assignment, TABLE, change, m.Telemetry(runtime="flwr 1"))
        line = LoopbackTransport(fleet=place.coordinator, device=device, latency_s=0.01)
        reply = await line.upload(header, lambda first, size_bytes, data=payload: data[first : first + size_bytes])
        assert reply.update_state is m.UpdateState.ACCEPTED
    await settle()


async def values_of(place: Place) -> Values:
    """Return the arrays of the newest Version."""
    version = await place.state.stores.runs.newest_version("run")
    return TABLE.views(load_parameters(place.state.blobs, version, TABLE))


async def events_of(place: Place, kind: type) -> list[object]:
    """Return the events of a kind so far."""
    page = await place.state.stores.runs.event_page("run", 0)
    return [entry.event for entry in page if isinstance(entry.event, kind)]
