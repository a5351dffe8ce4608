"""Wire form of Plans (``plan.proto``)."""

from fanin.protos.convert import section_from_proto, write_section
from fanin.protos.plans import Plan
from fanin.v1 import plan_pb2


def plan_to_proto(plan: Plan) -> plan_pb2.Plan:
    message = plan_pb2.Plan()
    write_section(plan, message)
    return message


def plan_from_proto(message: plan_pb2.Plan) -> Plan:
    return section_from_proto(Plan, message)
