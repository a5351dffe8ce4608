"""Runs with stages through the production coordinator, and their devices as ``fleet.proto`` describes them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from sqlalchemy import text

from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.versions import add_auxiliary
from fanin.edge.codecs.codec import codec_of
from fanin.edge.codecs.pipeline import States, UpdatePipeline, first_states
from fanin.edge.codecs.stages import layout_of, stages_of
from fanin.edge.tensors import Float32s, TensorTable, decode_parameters
from fanin.protos import messages as m
from fanin.protos.chunks import Artifact, artifact_of
from fanin.protos.messages import Adopt, Command, Pause
from fanin.protos.plans import Plan
from fanin.protos.wire import to_proto
from fanin.server.aggregation.parameters import auxiliary_pieces
from fanin.server.aggregation.verify import verify_run
from fanin.server.storage.disk import Durability
from fanin.server.storage.sqlite.engine import open_engine
from fanin.simulation import LoopbackTransport
from fanin.v1 import fleet_pb2
from support.staleness import settle
from support.virtual import SHAPES, Place, bundle_in, open_place, plan, start

TABLE = TensorTable.of(SHAPES)
NUM = TABLE.num_values
FEEDBACK = m.StageSpec(name="error_feedback")
CAPABILITIES = m.Capabilities(
    codecs=("fixed32",), runtimes=("scripted 1",), graph_formats=("onnx",), stages=("error_feedback", "scaffold")
)


def scaffold(num_devices: int) -> m.StageSpec:
    """Return the stage SCAFFOLD for this number of devices."""
    return m.StageSpec(name="scaffold", options={"num_devices": float(num_devices)})


def staged_plan(num_devices: int, concurrency: int, **changes: object) -> Plan:
    """Return a Plan with SCAFFOLD and error feedback. A Round without ``concurrency`` Updates fails after a minute."""
    fields = {"concurrency": concurrency, "buffer": concurrency, "quorum": concurrency, "deadline_s": 60.0}
    return plan(stages=(scaffold(num_devices), FEEDBACK), **(fields | {"max_rounds": 50} | changes))


async def open_run(folder: Path, plan: Plan) -> Place:
    """Return a coordinator with one Run of a Bundle for SCAFFOLD."""
    place = open_place(folder)
    await start(place.runs, bundle_in(folder, scaffold=True), plan)
    return place


async def reopen(folder: Path, place: Place) -> Place:
    """Stop the coordinator. Return another one over the same folder."""
    await place.runs.stop()
    place = open_place(folder)
    await place.runs.start()
    return place


@dataclass
class StagedDevice:
    """A device that keeps the states after all of its Updates, and uses the state that an Assignment names."""

    name: str
    states: dict[m.StageState, States] = field(default_factory=dict)

    @property
    def num_examples(self) -> int:
        """A different number for each device, so a mean weighted by examples differs from a mean over devices."""
        return 10 * (ord(self.name[0]) - ord("a") + 1)

    async def check_in(self, place: Place, capabilities: m.Capabilities = CAPABILITIES) -> m.CheckInAnswer:
        """Check in with a short wait."""
        return await place.coordinator.check_in(
            self.name, m.CheckIn(protocol=m.PROTOCOL, capabilities=capabilities, wait_s=0.1)
        )

    async def assignment(self, place: Place) -> m.Assignment:
        """Check in, and return the Assignment that the coordinator must answer with."""
        answer = await self.check_in(place)
        assert isinstance(answer, m.Assigned), answer
        return answer.assignment

    def state(self, work: m.Assignment) -> States:
        """Return the state that an Assignment names."""
        if not work.state.round:
            return first_states(stages_of(work.stages), NUM)
        return self.states[work.state]

    async def send(self, place: Place, work: m.Assignment, change: Float32s) -> m.UploadReply:
        """Apply the stages to a change, and upload the Update."""
        header, payload = await self.update(place, work, change)
        return await self.transport(place).upload(
            header, lambda offset, size_bytes: payload[offset : offset + size_bytes]
        )

    async def update(self, place: Place, work: m.Assignment, change: Float32s) -> tuple[m.UpdateHeader, bytes]:
        """Apply the stages to a change. The resulting state is stored before the Update is sent."""
        stages = stages_of(work.stages)
        pipeline = UpdatePipeline(
            codec=codec_of(work.codec),
            grid=work.grid,
            learning_rate=work.training.learning_rate,
            stages=stages,
            layout=layout_of(TABLE, stages),
            downlink={"control": await self.control(place, work)},
            rng_of=lambda purpose, values: np.random.default_rng([len(purpose), values.size, work.round]),
        )
        outcome = pipeline.apply(change, 2, self.state(work))
        self.states[replace(work.state, round=work.round)] = outcome.states
        counts = {
            m.EXAMPLES: self.num_examples,
            m.ROUNDED: outcome.encoded.num_rounded,
            m.SATURATED: outcome.encoded.num_saturated,
        }
        header = m.UpdateHeader(
            format=m.UPDATE_FORMAT,
            assignment_id=work.assignment_id,
            run_id=work.run_id,
            round=work.round,
            version_sha256=work.version.sha256,
            codec=work.codec.name,
            shifts=outcome.encoded.shifts,
            payload=artifact_of(outcome.encoded.payload),
            statistics=m.Statistics(counts=counts),
            telemetry=m.Telemetry(runtime="scripted 1"),
        )
        return header, outcome.encoded.payload

    async def control(self, place: Place, work: m.Assignment) -> Float32s:
        """Return the control variate of the Version; it is zero in the first Version of a lineage."""
        if work.version.number == work.state.lineage:
            assert not work.version.auxiliary
            return np.zeros(NUM, np.float32)
        transport, chunks = self.transport(place), work.version.auxiliary["control"].chunks
        data = b"".join([await transport.download(work.assignment_id, ref.sha256) for ref in chunks])
        table, values = decode_parameters(data)
        assert table == TensorTable.of({"values": (NUM,)})
        return values

    def transport(self, place: Place) -> LoopbackTransport:
        """Return the device's transport."""
        return LoopbackTransport(fleet=place.coordinator, device=self.name, latency_s=0.01)


DEVICES = ("a", "b", "c")
STAGED_PLAN = staged_plan(len(DEVICES), concurrency=2)
"""In each Round, one of three devices does not take part."""


def change_of(device: str, round_number: int, size: float = 0.3) -> Float32s:
    rng = np.random.default_rng([ord(device), round_number])
    return rng.normal(0.0, size, NUM).astype(np.float32)


def problems(place: Place) -> list[str]:
    return [verdict.problem for verdict in verify_run(place.state, "run") if verdict.problem]


async def control_of(place: Place) -> Float32s:
    """Return the control variate of the newest Version, or zeros without one."""
    version = await place.state.stores.runs.newest_version("run")
    setup = place.runs.driver("run").setup
    return np.concatenate(list(auxiliary_pieces(place.state.blobs, version, "control", setup.layout.auxiliary)))


async def take_round(place: Place, devices: Sequence[StagedDevice]) -> None:
    for device in devices:
        work = await device.assignment(place)
        reply = await device.send(place, work, change_of(device.name, work.round))
        assert reply.update_state is m.UpdateState.ACCEPTED
    await settle()


async def roll_back(place: Place, number: int, command_id: str) -> None:
    await place.runs.command(Command(command_id=f"{command_id}-pause", run_id="run", what=Pause()))
    await settle()
    adopt = Adopt(from_run_id="run", number=number, rounds=50)
    await place.runs.command(Command(command_id=command_id, run_id="run", what=adopt))
    await settle()


def falsify(folder: Path, place: Place, auxiliary: dict[str, Artifact], number: int = 1) -> None:
    """Replace a recorded Version by one with other auxiliary tensors, signed with the Run's key."""
    runs = place.state.runs
    before = runs.version("run", number)
    assert before is not None
    key = SigningKey(runs.run_key("run", 1, b"", 0.0))
    assert (before.parent, before.public_key) == (number - 1, key.public)
    replacement = add_auxiliary(key, before, auxiliary)
    data = to_proto(replacement, fleet_pb2.Version).SerializeToString()
    engine = open_engine(folder / "state" / "fanin.db", Durability.PROCESS)
    with engine.begin() as connection:
        statement = text("UPDATE versions SET version_proto = :data WHERE number = :number")
        connection.execute(statement, {"data": data, "number": number})
    engine.dispose()
