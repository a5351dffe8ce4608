"""Wire form of Assignments."""

from fanin.protos.convert.version_wire import bundle_from_proto, bundle_to_proto, version_from_proto, version_to_proto
from fanin.protos.messages import Assignment, CodecSpec, Training
from fanin.v1 import fleet_pb2 as pb


def codec_to_proto(codec: CodecSpec) -> pb.Codec:
    return pb.Codec(name=codec.name, max_shift=codec.max_shift)


def codec_from_proto(message: pb.Codec) -> CodecSpec:
    return CodecSpec(name=message.name, max_shift=message.max_shift)


def training_to_proto(training: Training) -> pb.Training:
    return pb.Training(
        epochs=training.epochs,
        learning_rate=training.learning_rate,
        seed=training.seed,
        proximal_weight=training.proximal_weight,
        batch_size=training.batch_size,
    )


def training_from_proto(message: pb.Training) -> Training:
    return Training(
        epochs=message.epochs,
        learning_rate=message.learning_rate,
        seed=message.seed,
        proximal_weight=message.proximal_weight,
        batch_size=message.batch_size,
    )


def assignment_to_proto(work: Assignment) -> pb.Assignment:
    return pb.Assignment(
        assignment_id=work.assignment_id,
        run_id=work.run_id,
        round=work.round,
        bundle=bundle_to_proto(work.bundle),
        version=version_to_proto(work.version),
        grid=pb.Grid(exponents=work.grid),
        codec=codec_to_proto(work.codec),
        training=training_to_proto(work.training),
        deadline_s=work.deadline_s,
        relay=work.relay,
    )


def assignment_from_proto(message: pb.Assignment) -> Assignment:
    return Assignment(
        assignment_id=message.assignment_id,
        run_id=message.run_id,
        round=message.round,
        bundle=bundle_from_proto(message.bundle),
        version=version_from_proto(message.version),
        grid=tuple(message.grid.exponents),
        codec=codec_from_proto(message.codec),
        training=training_from_proto(message.training),
        deadline_s=message.deadline_s,
        relay=message.relay,
    )
