"""Wire form of Assignments."""

from typing import Final

from fanin.protos.convert.section_wire import section_from_proto, write_section
from fanin.protos.convert.version_wire import bundle_from_proto, bundle_to_proto, version_from_proto, version_to_proto
from fanin.protos.messages import Assignment, CodecSpec, StageState, Training
from fanin.protos.plans import FlowerPlan, StageSpec, Statistic
from fanin.v1 import fleet_pb2 as pb

FIRST: Final = StageState()


def assignment_to_proto(work: Assignment) -> pb.Assignment:
    message = pb.Assignment(
        assignment_id=work.assignment_id,
        run_id=work.run_id,
        round=work.round,
        bundle=bundle_to_proto(work.bundle),
        version=version_to_proto(work.version),
        grid=pb.Grid(exponents=work.grid),
        deadline_s=work.deadline_s,
        relay=work.relay,
        progress_s=work.progress_s,
        state=pb.StageState(lineage=work.state.lineage, round=work.state.round) if work.state != FIRST else None,
    )
    write_section(work.codec, message.codec)
    write_section(work.training, message.training)
    if work.flower != FlowerPlan():
        write_section(work.flower, message.flower)
    for stage in work.stages:
        write_section(stage, message.stages.add())
    for statistic in work.statistics:
        write_section(statistic, message.statistics.add())
    return message


def assignment_from_proto(message: pb.Assignment) -> Assignment:
    return Assignment(
        assignment_id=message.assignment_id,
        run_id=message.run_id,
        round=message.round,
        bundle=bundle_from_proto(message.bundle),
        version=version_from_proto(message.version),
        grid=tuple(message.grid.exponents),
        codec=section_from_proto(CodecSpec, message.codec),
        training=section_from_proto(Training, message.training),
        deadline_s=message.deadline_s,
        relay=message.relay,
        progress_s=message.progress_s,
        stages=tuple(section_from_proto(StageSpec, stage) for stage in message.stages),
        statistics=tuple(section_from_proto(Statistic, statistic) for statistic in message.statistics),
        flower=section_from_proto(FlowerPlan, message.flower),
        state=StageState(lineage=message.state.lineage, round=message.state.round),
    )
