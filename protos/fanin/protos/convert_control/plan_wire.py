"""Wire form of Plans (``plan.proto``)."""

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from fanin.protos.convert import section_from_proto, write_section
from fanin.protos.errors import InvalidPlan
from fanin.protos.plans import Plan
from fanin.v1 import plan_pb2


def plan_to_proto(plan: Plan) -> plan_pb2.Plan:
    message = plan_pb2.Plan()
    write_section(plan, message)
    return message


def plan_from_proto(message: plan_pb2.Plan) -> Plan:
    """Read a Plan. A key that this version does not know would be ignored, and the Run would compute something else."""
    sections = {field.name: value for field, value in message.ListFields() if isinstance(value, Message)}
    for section, value in ({"": message} | sections).items():
        if len(unknown := UnknownFieldSet(value)):
            raise InvalidPlan(
                f"plan: {section}: got field {unknown[0].field_number}, which this version of fanin does not know, "
                "expected the keys of docs/plan.md; use the version of fanin that wrote the Plan"
            )
    return section_from_proto(Plan, message)
