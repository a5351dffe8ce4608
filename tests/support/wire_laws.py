"""Generated values of every type on the wire. Type hints and messages determine them, so that no field is forgotten.

``pairs`` finds each dataclass with its message: it follows the fields of ``SENT``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from enum import Enum
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from fanin.protos import messages as m
from fanin.protos import plans as p
from fanin.protos.chunks import Artifact, ChunkRef, artifact_of
from fanin.protos.fields import Mark, OneOf
from fanin.protos.plans.entries import Option, Setting
from fanin.protos.roles import TensorRole
from fanin.v1 import access_pb2, control_pb2, fleet_pb2
from support import laws as s

SENT: Final[dict[type, type[Message]]] = {
    m.Enrollment: fleet_pb2.EnrollRequest,
    m.CheckIn: fleet_pb2.CheckInRequest,
    m.CheckInReply: fleet_pb2.CheckInReply,
    m.Download: fleet_pb2.DownloadRequest,
    m.UploadRequest: fleet_pb2.UploadRequest,
    m.UploadReply: fleet_pb2.UploadReply,
    m.Report: fleet_pb2.ReportRequest,
    m.ExchangeRequest: fleet_pb2.ExchangeRequest,
    m.ExchangeReply: fleet_pb2.ExchangeReply,
    m.StartRun: control_pb2.StartRunRequest,
    m.Reclaim: control_pb2.ReclaimRunRequest,
    m.Command: control_pb2.CommandRequest,
    m.Prune: control_pb2.PruneRequest,
    m.Pruned: control_pb2.PruneReply,
    m.RunQuery: control_pb2.ListRunsRequest,
    m.ListedRuns: control_pb2.ListRunsReply,
    m.RunDescription: control_pb2.RunDescription,
    m.VersionWithBundle: control_pb2.GetVersionReply,
    m.AcceptedDevices: control_pb2.AcceptedDevicesReply,
    m.LoggedEvent: control_pb2.Event,
    m.WatchReply: control_pb2.WatchReply,
    m.NewToken: access_pb2.CreateTokenRequest,
    m.TokenRotation: access_pb2.RotateTokenRequest,
    m.TokenPage: access_pb2.ListTokensReply,
    m.DeviceQuery: access_pb2.ListDevicesRequest,
    m.DevicePage: access_pb2.ListDevicesReply,
    m.DeviceChange: access_pb2.ChangeDeviceRequest,
    m.AuditPage: access_pb2.ListAuditReply,
    m.PopulationPage: access_pb2.ListPopulationsReply,
    m.LedgerPage: access_pb2.ListLedgerReply,
    m.LostInterval: access_pb2.ChargePopulationRequest,
}
"""The types that are sent by themselves."""
BY_WIRE_TYPE: Final[Mapping[int, st.SearchStrategy[Any]]] = MappingProxyType(
    {
        FieldDescriptor.TYPE_BOOL: st.booleans(),
        FieldDescriptor.TYPE_STRING: s.TEXTS,
        FieldDescriptor.TYPE_BYTES: st.binary(max_size=20),
        FieldDescriptor.TYPE_DOUBLE: s.FLOATS,
        FieldDescriptor.TYPE_UINT32: s.UINT32,
        FieldDescriptor.TYPE_UINT64: s.UINT64,
        FieldDescriptor.TYPE_SINT32: st.integers(-(1 << 31), (1 << 31) - 1),
        FieldDescriptor.TYPE_SINT64: st.integers(-(1 << 63), (1 << 63) - 1),
    }
)
BY_NAME: Final[Mapping[str, st.SearchStrategy[Any]]] = MappingProxyType(
    {
        "run_id": s.NAMES,
        "assignment_id": s.NAMES,
        "download_id": s.NAMES,
        "command_id": s.NAMES,
        "sha256": s.DIGESTS,
        "public_key": s.KEYS,
        "run_public_key": s.KEYS,
        "signature": s.SIGNATURES,
        "epoch": s.EPOCHS,
    }
)
"""Fields that have one form in all types."""
COUNTS: Final = st.integers(0, m.MAX_COUNT)
TAGS: Final = st.dictionaries(s.NAMES, s.PRINTABLES, max_size=3)
BY_FIELD: Final[Mapping[tuple[type, str], st.SearchStrategy[Any]]] = MappingProxyType(
    {
        (m.Principal, "id"): s.NAMES,
        (m.CheckIn, "wait_s"): s.SECONDS,
        (m.CheckIn, "fanin_version"): st.just("") | s.PRINTABLES,
        (m.DeviceCondition, "battery_percent"): st.none() | st.integers(0, 100),
        (m.NewToken, "name"): s.NAMES,
        **dict.fromkeys(
            ((m.NewToken, "lifetime_s"), (m.TokenRotation, "lifetime_s")), st.none() | st.floats(1e-3, 1e6)
        ),
        (m.TokenRotation, "name"): s.NAMES,
        (m.NewToken, "max_uses"): st.none() | st.integers(1, 1 << 31 - 1),
        (m.NewToken, "label"): st.just("") | s.PRINTABLES,
        **dict.fromkeys(((m.NewToken, "tags"), (m.DeviceQuery, "tags"), (m.TagDevice, "set")), TAGS),
        (m.TagDevice, "remove"): st.lists(s.NAMES, max_size=3).map(tuple),
        (m.LabelDevice, "label"): st.just("") | s.PRINTABLES,
        (m.BanDevice, "reason"): st.just("") | s.PRINTABLES,
        (m.DeviceQuery, "prefix"): st.just("") | s.NAMES,
        (m.DeviceQuery, "unseen_s"): st.none() | st.floats(0.0, 1e9),
        (m.DeviceChange, "device_id"): s.NAMES,
        (m.LostInterval, "population"): s.NAMES,
        (m.LostInterval, "run_id"): st.just("") | s.NAMES,
        (m.LostInterval, "rounds"): st.integers(0, p.MAX_TIMES),
        (m.Wait, "retry_min_s"): s.SECONDS,
        (m.Wait, "retry_max_s"): s.SECONDS,
        **{(m.Capabilities, name): st.lists(s.PRINTABLES, max_size=3).map(tuple) for name in ("codecs", "runtimes")},
        **{(m.Capabilities, name): st.lists(s.NAMES, max_size=3).map(tuple) for name in ("graph_formats", "stages")},
        (m.Capabilities, "round_protocols"): st.lists(s.NAMES, max_size=3).map(tuple),
        (m.RoundInfo, "phase"): s.NAMES,
        (m.ExchangeRequest, "phase"): s.NAMES,
        (m.ExchangeRequest, "wait_s"): st.floats(0.0, 60.0),
        (m.ExchangePause, "retry_min_s"): st.floats(0.0, 60.0),
        (m.ExchangePause, "retry_max_s"): st.floats(0.0, 60.0),
        (m.Assignment, "grid"): st.lists(st.integers(m.MIN_GRID_EXPONENT, m.MAX_GRID_EXPONENT), max_size=4).map(tuple),
        (m.Assignment, "range_examples"): st.integers(0, m.RANGE_EXAMPLES),
        **dict.fromkeys(
            ((m.PrivacyTerms, name) for name in ("clip_norm", "noise_multiplier", "epsilon", "delta")),
            st.floats(1e-300, 1e300),
        ),
        **dict.fromkeys(((m.PrivacyTerms, name) for name in ("mechanism", "population")), s.NAMES),
        (m.PrivacyTerms, "sampling_rate"): st.floats(0.0, 0.9),
        (m.PrivacyTerms, "bits_noise"): st.floats(0.0, 1e6),
        **dict.fromkeys(
            ((m.PrivacyTerms, name) for name in ("squared_sensitivity", "population_size")),
            st.integers(1, m.MAX_NUMBER),
        ),
        (m.RangeCounts, "cells"): st.sets(s.UINT32, max_size=4).map(lambda cells: tuple(sorted(cells))),
        (m.RangeCounts, "counts"): st.lists(st.integers(1, 9), min_size=4, max_size=4).map(tuple),
        (m.Version, "number"): st.integers(0, m.MAX_NUMBER),
        (m.Version, "auxiliary"): st.dictionaries(s.NAMES, s.ARTIFACTS, max_size=2),
        (m.UpdateHeader, "payload"): st.binary(max_size=20).map(artifact_of),
        (m.Statistics, "counts"): st.dictionaries(s.NAMES, st.integers(-m.MAX_SUM, m.MAX_SUM), max_size=4),
        (m.Telemetry, "runtime"): st.just("") | s.PRINTABLES,
        (m.Telemetry, "fanin_version"): st.just("") | s.PRINTABLES,
        (m.Telemetry, "train_s"): s.SECONDS,
        (m.Telemetry, "bytes_downloaded"): COUNTS,
        (m.Telemetry, "bytes_resumed"): COUNTS,
        (m.Telemetry, "partition"): st.none() | COUNTS,
        (m.VersionEvaluation, "values"): st.dictionaries(s.TEXTS, s.SECONDS, max_size=3),
        (m.Adopt, "from_run_id"): st.just("") | s.NAMES,
        (m.Adopt, "number"): st.integers(0, m.MAX_NUMBER),
        (m.Reclaim, "adopted_number"): st.integers(0, m.MAX_NUMBER),
        (p.StopPlan, "max_rounds"): st.integers(1, p.MAX_TIMES),
        (p.StopPlan, "min_delta"): s.SECONDS,
        (p.StopPlan, "max_int8_drop"): st.floats(0.0, 100.0),
        (p.MetricSpec, "name"): s.NAMES,
    }
)
"""Fields whose type or message allows more than their dataclass does."""
BY_TYPE: Final[Mapping[type, st.SearchStrategy[Any]]] = MappingProxyType(
    {
        Artifact: s.ARTIFACTS,
        ChunkRef: s.CHUNKS,
        p.Plan: s.plans(),
        p.CohortPlan: s.cohorts(),
        p.AggregationPlan: s.AGGREGATION_PLANS,
        p.CodecSpec: s.CODEC_SPECS,
        p.EvaluationPlan: s.EVALUATION_PLANS,
        p.Int8Plan: s.INT8_PLANS,
        p.RetentionPlan: s.RETENTION_PLANS,
        p.ParticipantsPlan: s.PARTICIPANTS_PLANS,
        p.PrivacyPlan: s.PRIVACY_PLANS,
        p.FlowerPlan: s.FLOWER_PLANS,
        p.ScheduledChange: s.schedules(p.FlowerPlan()).filter(bool).map(lambda changes: changes[0]),
        p.StageSpec: s.STAGES,
        p.RoundPlan: s.ROUND_PLANS,
        p.Statistic: s.DECLARED,
        p.Training: s.TRAININGS,
    }
)
"""The content of Chunks, and sections of a Plan, which ``laws`` draws."""
Values = dict[str, Any]


def _closed(drawn: Values) -> Values:
    return drawn | {"num_accepted": max(drawn["num_accepted"], len(drawn["accepted"]), 1)}


def _gone(drawn: Values) -> Values:
    return drawn | {"num_devices": max(drawn["num_devices"], len(drawn["device_ids"]))}


def _token(drawn: Values) -> Values:
    enrolls = {"max_uses": None, "label": "", "tags": {}}
    return drawn if drawn["role"] is m.Role.DEVICE else drawn | enrolls


def _version(drawn: Values) -> Values:
    auxiliary = MappingProxyType(dict(sorted(drawn["auxiliary"].items())))
    return drawn | {"parent": min(drawn["parent"], max(drawn["number"] - 1, 0)), "auxiliary": auxiliary}


def _reclaim(drawn: Values) -> Values:
    version = replace(drawn["version"], delegation=None)
    return drawn | {
        "version": version,
        "delegation": replace(drawn["delegation"], run_id=version.run_id, epoch=version.epoch),
    }


def _saturated(drawn: Values) -> Values:
    return drawn | {"num_values": m.saturated_devices(drawn["num_values"]).num_values}


FITTED: Final[Mapping[type, Callable[[Values], Values]]] = MappingProxyType(
    {
        m.Wait: lambda drawn: drawn | {"retry_max_s": drawn["retry_min_s"] + drawn["retry_max_s"]},
        m.TrainingProgress: lambda drawn: (
            drawn
            | {"step": min(drawn["step"], drawn["num_steps"] or drawn["step"])}
            | {"epoch": min(drawn["epoch"], drawn["num_epochs"] or drawn["epoch"])}
        ),
        m.ExchangePause: lambda drawn: drawn | {"retry_max_s": drawn["retry_min_s"] + drawn["retry_max_s"]},
        m.Report: lambda drawn: drawn | {"progress": None if drawn["failure"] else drawn["progress"]},
        m.Version: _version,
        m.RangeCounts: lambda drawn: drawn | {"counts": drawn["counts"][: len(drawn["cells"])]},
        m.Reclaim: _reclaim,
        m.RoundClosed: _closed,
        m.DevicesGone: _gone,
        m.SaturatedDevices: _saturated,
        m.NewToken: _token,
    }
)
"""What the constructors demand of several fields."""


_PAIRS: Final[dict[type, type[Message]]] = {}


def pairs() -> dict[str, tuple[type, type[Message]]]:
    """Return each dataclass that has a message, with its message, by name."""
    for kind, message in SENT.items():
        values(kind, message)
    return {kind.__name__: (kind, message) for kind, message in _PAIRS.items()}


@cache
def values(kind: type, message: type) -> st.SearchStrategy[Any]:
    """Return the values of a dataclass, with any value in each of its fields that the message has."""
    _PAIRS[kind] = message
    return _fitted(kind, _draws(kind, message.DESCRIPTOR, message.DESCRIPTOR))


def _fitted(kind: type, draws: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    fit = FITTED.get(kind, lambda drawn: drawn)
    return BY_TYPE.get(kind, st.fixed_dictionaries(draws).map(lambda drawn: kind(**fit(drawn))))


def _draws(kind: type, message: Descriptor, outer: Descriptor) -> dict[str, st.SearchStrategy[Any]]:
    """Return the values of each field. ``outer`` is the message around that of a variant."""
    draws = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        target, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if any(isinstance(note, OneOf) for note in notes):
            draws[name] = st.one_of(*(_variant(each, message) for each in get_args(target)))
        elif Mark.WHOLE in notes:
            draws[name] = values(target, GetMessageClass(message))
        elif Mark.BESIDE in notes:
            draws[name] = _value(target, outer.fields_by_name[name])
        elif name in message.fields_by_name:
            derived = _value(target, message.fields_by_name[name])
            draws[name] = BY_FIELD.get((kind, name), BY_NAME.get(name, derived))
        else:
            assert Mark.LOCAL in notes, f"{message.name}: has no field {name}"
    return draws


def _variant(kind: type, outer: Descriptor) -> st.SearchStrategy[Any]:
    snake = re.sub(r"(?<!^)([A-Z])", r"_\1", kind.__name__).lower()
    (wire,) = (each for each in outer.fields if snake == each.name or kind.__name__ == _name(each))
    marks = [note for hint in get_type_hints(kind, include_extras=True).values() for note in get_args(hint)]
    if Mark.WHOLE in marks or Mark.BESIDE in marks:
        return _fitted(kind, _draws(kind, wire.message_type, outer))
    return values(kind, GetMessageClass(wire.message_type))


def _name(wire: FieldDescriptor) -> str:
    return "" if wire.message_type is None else wire.message_type.name


def _value(kind: Any, wire: FieldDescriptor) -> st.SearchStrategy[Any]:
    if kind is TensorRole:
        return s.ROLES
    if kind in (Setting, Option):
        return s.SETTINGS if kind == Setting else st.one_of(*s.SCALARS[:-1])
    if get_origin(kind) is Annotated:
        return _value(get_args(kind)[0], wire)
    if get_origin(kind) in (UnionType, Union):
        (present,) = (each for each in get_args(kind) if each is not NoneType)
        return st.none() | _value(present, wire)
    if get_origin(kind) is tuple:
        items = wire if wire.is_repeated else wire.message_type.fields[0]
        return st.lists(_value(get_args(kind)[0], items), max_size=3).map(tuple)
    if get_origin(kind) in (dict, Mapping):
        item = _value(get_args(kind)[1], wire.message_type.fields[1])
        return st.dictionaries(s.TEXTS, item, max_size=3).map(MappingProxyType)
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    return values(kind, GetMessageClass(wire.message_type)) if is_dataclass(kind) else BY_WIRE_TYPE[wire.type]
