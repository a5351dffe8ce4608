"""Wire form of evaluations on held-out data. The coordinator's database holds them in this form."""

from collections.abc import Iterable
from types import MappingProxyType

from fanin.protos.messages import VersionEvaluation
from fanin.v1 import control_pb2 as pb


def evaluation_to_proto(evaluation: VersionEvaluation) -> pb.VersionEvaluation:
    return pb.VersionEvaluation(
        version=evaluation.version,
        data=evaluation.data,
        data_sha256=evaluation.data_sha256,
        num_examples=evaluation.num_examples,
        values=evaluation.values,
        runtime=evaluation.runtime,
        seconds=evaluation.seconds,
        time=evaluation.time,
        problem=evaluation.problem,
    )


def evaluation_from_proto(message: pb.VersionEvaluation) -> VersionEvaluation:
    return VersionEvaluation(
        version=message.version,
        data=message.data,
        data_sha256=message.data_sha256,
        num_examples=message.num_examples,
        # A protobuf map has no order. Sorting makes the value equal in every process.
        values=MappingProxyType(dict(sorted(message.values.items()))),
        runtime=message.runtime,
        seconds=message.seconds,
        time=message.time,
        problem=message.problem,
    )


def evaluations_to_proto(evaluations: Iterable[VersionEvaluation]) -> pb.EvaluationsReply:
    return pb.EvaluationsReply(evaluations=map(evaluation_to_proto, evaluations))


def evaluations_from_proto(message: pb.EvaluationsReply) -> tuple[VersionEvaluation, ...]:
    return tuple(map(evaluation_from_proto, message.evaluations))
