"""Conversion of the operator's protocol to the wire (``control.proto``, ``plan.proto``) and back.

Modules in reading order:

    plan_wire      Plans
    principal_wire who made a call
    evaluation_wire evaluations on held-out data
    run_wire       Runs, Rounds, descriptions, Versions with their Bundles
    command_wire   pause, resume, stop, adopt
    event_wire     the event log

The rules are those of ``fanin.protos.convert``.
"""

from fanin.protos.convert_control.command_wire import command_from_proto, command_to_proto
from fanin.protos.convert_control.evaluation_wire import (
    evaluation_from_proto,
    evaluation_to_proto,
    evaluations_from_proto,
    evaluations_to_proto,
)
from fanin.protos.convert_control.event_wire import event_from_proto, event_to_proto, from_sequence_from_proto
from fanin.protos.convert_control.plan_wire import plan_from_proto, plan_to_proto
from fanin.protos.convert_control.run_wire import (
    accepted_devices_from_proto,
    accepted_devices_to_proto,
    description_from_proto,
    description_to_proto,
    listed_runs_from_proto,
    listed_runs_to_proto,
    num_rounds_from_proto,
    reclaim_from_proto,
    reclaim_to_proto,
    round_info_from_proto,
    round_info_to_proto,
    run_info_from_proto,
    run_info_to_proto,
    run_state_from_proto,
    start_run_from_proto,
    start_run_to_proto,
    version_number_from_proto,
    version_with_bundle_from_proto,
    version_with_bundle_to_proto,
)

__all__ = [
    "accepted_devices_from_proto",
    "accepted_devices_to_proto",
    "command_from_proto",
    "command_to_proto",
    "description_from_proto",
    "description_to_proto",
    "evaluation_from_proto",
    "evaluation_to_proto",
    "evaluations_from_proto",
    "evaluations_to_proto",
    "event_from_proto",
    "event_to_proto",
    "from_sequence_from_proto",
    "listed_runs_from_proto",
    "listed_runs_to_proto",
    "num_rounds_from_proto",
    "plan_from_proto",
    "plan_to_proto",
    "reclaim_from_proto",
    "reclaim_to_proto",
    "round_info_from_proto",
    "round_info_to_proto",
    "run_info_from_proto",
    "run_info_to_proto",
    "run_state_from_proto",
    "start_run_from_proto",
    "start_run_to_proto",
    "version_number_from_proto",
    "version_with_bundle_from_proto",
    "version_with_bundle_to_proto",
]
