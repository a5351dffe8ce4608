"""Plans that secure aggregation cannot serve are refused before a Run begins, with the reason."""

import hashlib
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from house.tree import ROOT
from support.secagg import plan_of
from support.virtual import PUBLISHER, open_place, start

from fanin.edge.basis import RoundBasis
from fanin.edge.masking.settings import MaskSettings
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import CodecSpec, StageSpec, Statistic
from fanin.protos.plans import Int8Plan, ParticipantsPlan, Plan, RoundPlan
from fanin.server.protocols.known import protocol_of
from fanin.server.runs.recorded_setup import check_names
from fanin.server.selection.policies import POLICIES
from fanin.simulation import run_virtual, synthetic_bundle

WHOLE = plan_of("secagg", 10, 10)
AUTHORITY = "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"


def with_options(concurrency: int = 10, quorum: int = 10, **options: object) -> Plan:
    return plan_of("secagg", concurrency, quorum, **options)


def with_aggregation(**changes: object) -> Plan:
    return replace(WHOLE, aggregation=replace(WHOLE.aggregation, **changes))


REFUSED = {
    "staleness": (with_aggregation(max_staleness=1), "FN-1601", "aggregation.max_staleness 1"),
    "a column rule": (with_aggregation(rule="trimmed_mean"), "FN-1601", "a rule or a strategy that is no sum"),
    "shifts": (replace(WHOLE, codec=CodecSpec(name="int8", max_shift=2)), "FN-1601", "codec.max_shift: got 2"),
    "ranges of devices": (replace(WHOLE, int8=Int8Plan(ranges="devices")), "FN-1601", "int8.ranges"),
    "examples in the clear": (
        replace(WHOLE, participants=ParticipantsPlan(min_examples=5)),
        "FN-1601",
        "participants.min_examples",
    ),
    "a smaller buffer": (
        replace(WHOLE, cohort=replace(WHOLE.cohort, buffer=9, quorum=9)),
        "FN-1601",
        "cohort.buffer 9",
    ),
    "a sum that overflows": (with_aggregation(max_examples=(1 << 32) - 1), "FN-1624", "could overflow"),
    "two survivors": (with_options(min_survivors=2), "FN-0216", "min_survivors: got 2"),
    "a quorum of two": (with_options(3, 2, dropout_fraction=0.34), "FN-1644", "cohort.quorum: got 2"),
    "fewer than the survivors": (with_options(min_survivors=11), "FN-1644", "expected at least 11"),
    "dropouts beyond the fraction": (with_options(10, 8), "FN-1644", "expected at least 0.2"),
    "a threshold that the quorum misses": (
        with_options(10, 6, dropout_fraction=0.4, threat="active", authority=AUTHORITY, adversarial_fraction=0.2),
        "FN-1626",
        "lower a fraction",
    ),
    "too many neighbors": (
        with_options(4100, 4100, dropout_fraction=0.0, threat="active", authority=AUTHORITY),
        "FN-1644",
        "expected at most 4033",
    ),
    "an active coordinator without an authority": (with_options(threat="active"), "FN-1643", "add authority"),
    "an authority of no use": (with_options(authority=AUTHORITY), "FN-1643", "remove authority"),
    "too few security bits": (with_options(security_bits=39), "FN-0216", "security_bits: got 39"),
    "fewer devices than survivors": (with_options(2, 2), "FN-1644", "cohort.concurrency: got 2"),
    "an unknown threat": (with_options(threat="kind"), "FN-0216", "threat"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_masks_do_not_fit_is_refused(case: str) -> None:
    whole, code, text = REFUSED[case]
    with pytest.raises(InvalidPlan) as excinfo:
        check_names(whole, POLICIES)
    assert (excinfo.value.code, text in str(excinfo.value)) == (code, True), excinfo.value


def test_the_plan_of_the_page_is_served() -> None:
    page = (ROOT / "docs" / "howto" / "secure-aggregation.md").read_text()
    keys = tomllib.loads(page.partition("```toml\n")[2].partition("```")[0])
    cohort = replace(WHOLE.cohort, buffer=keys["cohort"]["concurrency"], **keys["cohort"])
    whole = replace(
        WHOLE,
        cohort=cohort,
        codec=CodecSpec(**keys["codec"]),
        aggregation=replace(WHOLE.aggregation, **keys["aggregation"]),
        round=RoundPlan(**keys["round"]),
    )
    protocol = protocol_of(whole)
    assert protocol.ring is not None
    assert protocol.ring.bits == 32


def test_both_sides_compute_the_terms_of_a_round_as_the_specification_says() -> None:
    basis = RoundBasis(
        run_id="run",
        lineage=3,
        round=7,
        version_sha256="ab" * 32,
        max_devices=10,
        grid=(-8, 2),
        codec=CodecSpec(name="int8", max_shift=0),
        statistics=(Statistic(name="examples", bound=4096), Statistic(name="train_loss_q16", bound=99)),
        num_values=12,
        work_sha256="cd" * 32,
    )
    text = f"work {'cd' * 32}\ncodec int8 8\ngrid -8 2\nexamples 4096\ntrain_loss_q16 99\n"
    terms = MaskSettings(min_survivors=5, dropout_fraction=0.25).terms(basis)
    assert terms.meaning_sha256 == hashlib.sha256(f"fanin secagg meaning v1\n{text}".encode()).digest()
    assert terms.version_sha256 == b"\xab" * 32
    assert (terms.layout.ring.bits, terms.layout.size_bytes) == (24, 3 * 12 + 8 * 2)
    assert (terms.run_id, terms.lineage, terms.round, terms.attempt) == ("run", 3, 7, 1)
    assert (terms.max_devices, terms.min_survivors) == (10, 5)
    assert (terms.assumptions.adversarial_ppm, terms.assumptions.dropout_ppm) == (100_000, 250_000)


@pytest.mark.parametrize(
    ("stages", "shapes", "text"),
    [
        ((StageSpec(name="scaffold", options={"num_devices": 10}),), {"a": (3,)}, "groups of values"),
        ((), {"a": (3,), "norm.running_mean": (3,)}, "running statistics or counters"),
    ],
)
def test_values_that_are_averaged_apart_are_refused_when_the_run_starts(
    tmp_path: Path, stages: tuple[StageSpec, ...], shapes: dict[str, tuple[int, ...]], text: str
) -> None:
    async def main() -> None:
        place = open_place(tmp_path)
        bundle = synthetic_bundle(tmp_path / "bundle", PUBLISHER, shapes, scaffold=bool(stages))
        with pytest.raises(InvalidPlan, match=text) as excinfo:
            await start(place.runs, bundle, replace(WHOLE, stages=stages))
        assert excinfo.value.code == "FN-1601"
        await place.coordinator.stop()
        await place.runs.stop()

    run_virtual(main())
