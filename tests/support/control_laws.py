"""Strategies of the operator's protocol: Runs, events and commands."""

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from hypothesis import strategies as st

from fanin.protos import messages as m
from fanin.protos.messages import MAX_NUMBER
from support.laws import BUNDLES, DELEGATIONS, FLOATS, NAMES, SECONDS, TEXTS, UINT32, UINT64, plans, versions

PRINCIPALS: Final = st.builds(m.Principal, kind=st.sampled_from(m.PrincipalKind), id=NAMES)
VERSION_EVALUATIONS: Final = st.builds(
    m.VersionEvaluation,
    version=UINT64,
    data=TEXTS,
    data_sha256=TEXTS,
    num_examples=UINT64,
    values=st.dictionaries(TEXTS, st.floats(allow_nan=False, allow_infinity=False), max_size=3).map(MappingProxyType),
    runtime=TEXTS,
    seconds=SECONDS,
    time=SECONDS,
    problem=TEXTS,
)
RUN_INFOS: Final = st.builds(
    m.RunInfo,
    run_id=TEXTS,
    state=st.sampled_from(m.RunState),
    plan=st.none() | plans(),
    bundle_sha256=TEXTS,
    version=UINT64,
    epoch=UINT64,
    version_sha256=TEXTS,
    num_rounds=UINT32,
    max_rounds=UINT32,
    reason=TEXTS,
    started_by=st.none() | PRINCIPALS,
    newest_evaluation=st.none() | VERSION_EVALUATIONS,
    best_evaluation=st.none() | VERSION_EVALUATIONS,
)
LISTED_RUNS: Final = st.builds(m.ListedRuns, num_runs=UINT32, runs=st.lists(RUN_INFOS, max_size=2).map(tuple))
ROUND_INFOS: Final = st.builds(
    m.RoundInfo,
    round=UINT32,
    base_version=UINT64,
    phase=st.sampled_from(m.RoundPhase),
    num_updates=UINT32,
    opened_at=SECONDS,
    version=UINT64,
)
WARNINGS: Final = st.builds(m.RunWarned, code=TEXTS, subject=TEXTS, text=TEXTS)
SATURATED: Final = st.builds(m.saturated_devices, st.dictionaries(TEXTS, UINT64, max_size=3))
DESCRIPTIONS: Final = st.builds(
    m.RunDescription,
    run=RUN_INFOS,
    rounds=st.lists(ROUND_INFOS, max_size=3).map(tuple),
    grid=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=3).map(tuple),
    num_at_work=UINT32,
    at_work=st.lists(TEXTS, max_size=3).map(tuple),
    deadline_s=SECONDS,
    num_devices=UINT64,
    warnings=st.lists(WARNINGS, max_size=3).map(tuple),
    saturated=SATURATED,
)
START_RUNS: Final = st.builds(m.StartRun, run_id=TEXTS, plan=plans(), version=versions(), delegation=DELEGATIONS)
WITH_BUNDLES: Final = st.builds(m.VersionWithBundle, version=versions(), bundle=BUNDLES)
EVALUATIONS: Final = st.builds(
    m.Evaluation,
    num_examples=UINT64,
    loss=FLOATS,
    accuracy_float=FLOATS,
    accuracy_int8=FLOATS,
    int8_agreement=FLOATS,
    num_labels=UINT64,
    int8_rise_percent=st.none() | FLOATS,
)
SPREADS: Final = st.builds(
    m.DeviceSpread,
    num_devices=UINT32,
    **dict.fromkeys(("mean", "min", "p10", "median", "p90", "max"), FLOATS),
)
PUBLISHED: Final = st.builds(
    m.VersionPublished,
    number=UINT64,
    version_sha256=TEXTS,
    parent=UINT64,
    round=UINT32,
    round_s=FLOATS,
    bytes_down=UINT64,
    bytes_down_resumed=UINT64,
    bytes_up_resumed=UINT64,
    bytes_up=UINT64,
    num_saturated=UINT64,
    saturated=SATURATED,
    num_rounded=UINT64,
    num_clamped=UINT64,
    train_loss=FLOATS,
    train_loss_examples=UINT64,
    total_examples=UINT64,
    evaluation=st.none() | EVALUATIONS,
    runtimes=st.dictionaries(TEXTS, UINT32, max_size=3).map(MappingProxyType),
    statistics_examples=st.dictionaries(TEXTS, UINT64, max_size=3).map(MappingProxyType),
    device_spreads=st.dictionaries(TEXTS, SPREADS, max_size=3).map(MappingProxyType),
    adopted_run_id=TEXTS,
    adopted_number=UINT64,
    new_epoch=UINT64,
    by=st.none() | PRINCIPALS,
)
EVENTS: Final = st.builds(
    m.LoggedEvent,
    sequence=UINT64,
    time=FLOATS,
    event=st.builds(m.RoundOpened, round=UINT32, base_version=UINT64)
    | st.builds(m.round_closed, UINT32, st.lists(TEXTS, max_size=3))
    | st.builds(m.RoundFailed, round=UINT32, reason=TEXTS, others_wait=st.booleans())
    | st.builds(m.devices_gone, UINT32, st.lists(TEXTS, max_size=3))
    | PUBLISHED
    | st.builds(m.RunRested, state=st.sampled_from(m.RunState), reason=TEXTS, by=st.none() | PRINCIPALS)
    | st.builds(m.RunResumed, rounds=UINT32, by=st.none() | PRINCIPALS)
    | WARNINGS,
)
ACCEPTED_DEVICES: Final = st.builds(
    m.AcceptedDevices, num_accepted=UINT32, device_ids=st.lists(TEXTS, max_size=3).map(tuple)
)


@st.composite
def reclaims(draw: st.DrawFn) -> m.Reclaim:
    """Draw any request that begins an epoch."""
    version = replace(draw(versions()), delegation=None)
    delegation = replace(draw(DELEGATIONS), run_id=version.run_id, epoch=version.epoch)
    number = draw(st.integers(0, MAX_NUMBER))
    return m.Reclaim(delegation=delegation, version=version, adopted_number=number, rounds=draw(UINT32))


COMMANDS: Final = st.builds(
    m.Command,
    command_id=NAMES,
    run_id=TEXTS,
    what=st.builds(m.Pause)
    | st.builds(m.Resume, rounds=UINT32)
    | st.builds(m.Stop)
    | st.builds(
        m.Adopt,
        from_run_id=st.just("") | NAMES,
        number=st.integers(0, MAX_NUMBER),
        rounds=UINT32,
    ),
)
