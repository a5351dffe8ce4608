"""Conversion of the device protocol's messages to the wire (``fleet.proto``) and back.

Modules in reading order:

    checkin_wire      enrollment, check-ins and their answers
    assignment_wire   Assignments
    section_wire      sections of a Plan
    version_wire      Artifacts, Bundles, delegations, Versions, publications
    transfer_wire     downloads, uploads, reports

All functions are pure, and ``x_from_proto(x_to_proto(value)) == value`` (tests/laws/test_convert.py). ``x_to_proto``
never fails. ``x_from_proto`` raises InvalidInput for an unknown enum number, a missing part or a number out of range.
Unknown fields are ignored, as proto3 requires.
"""

from fanin.protos.convert.assignment_wire import assignment_from_proto, assignment_to_proto
from fanin.protos.convert.checkin_wire import (
    answer_from_proto,
    answer_to_proto,
    check_in_from_proto,
    check_in_to_proto,
    enrollment_from_proto,
    enrollment_to_proto,
)
from fanin.protos.convert.section_wire import section_from_proto, write_section
from fanin.protos.convert.transfer_wire import (
    download_from_proto,
    download_to_proto,
    header_from_proto,
    header_to_proto,
    progress_from_proto,
    progress_to_proto,
    report_from_proto,
    report_reply_to_proto,
    report_to_proto,
    telemetry_from_proto,
    telemetry_to_proto,
    upload_from_proto,
    upload_reply_from_proto,
    upload_reply_to_proto,
    upload_to_proto,
)
from fanin.protos.convert.version_wire import (
    artifact_from_proto,
    artifact_to_proto,
    bundle_from_proto,
    bundle_to_proto,
    delegation_from_proto,
    delegation_to_proto,
    publication_from_proto,
    publication_to_proto,
    version_from_proto,
    version_to_proto,
)

__all__ = [
    "answer_from_proto",
    "answer_to_proto",
    "artifact_from_proto",
    "artifact_to_proto",
    "assignment_from_proto",
    "assignment_to_proto",
    "bundle_from_proto",
    "bundle_to_proto",
    "check_in_from_proto",
    "check_in_to_proto",
    "delegation_from_proto",
    "delegation_to_proto",
    "download_from_proto",
    "download_to_proto",
    "enrollment_from_proto",
    "enrollment_to_proto",
    "header_from_proto",
    "header_to_proto",
    "progress_from_proto",
    "progress_to_proto",
    "publication_from_proto",
    "publication_to_proto",
    "report_from_proto",
    "report_reply_to_proto",
    "report_to_proto",
    "section_from_proto",
    "telemetry_from_proto",
    "telemetry_to_proto",
    "upload_from_proto",
    "upload_reply_from_proto",
    "upload_reply_to_proto",
    "upload_to_proto",
    "version_from_proto",
    "version_to_proto",
    "write_section",
]
