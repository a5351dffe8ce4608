"""The privacy floor: a device refuses less, before it downloads or trains, from any coordinator."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.scripted import SHAPES, FailingTrainer, Script, client_of, run, scripted_coordinator
from support.values import PUBLISHER

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.policy.ledger import read_ledger
from fanin.clients.device.policy.owner import POLICY_FILE, read_policy, write_policy
from fanin.clients.device.updates import Change
from fanin.clients.operator import ref_of
from fanin.clients.transport import ReadPayload
from fanin.edge.bundles.bundle import Bundle, SignedManifest, open_folder, read_signed_manifest, write_bundle
from fanin.edge.bundles.manifest_json import dump_manifest, parse_manifest
from fanin.edge.bundles.versions import sign_version
from fanin.edge.floors.floor import NO_FLOOR, PrivacyFloor
from fanin.edge.floors.rows import floor_row, parse_floor
from fanin.edge.masking.parameters import Threat
from fanin.edge.noise.clipping import ClipGrid
from fanin.edge.noise.loss import Loss
from fanin.protos import messages as m
from fanin.protos.errors import InvalidBundle, InvalidInput
from fanin.protos.plans import RoundPlan, Statistic
from fanin.simulation import SyntheticTrainer

TERMS = m.PrivacyTerms(
    mechanism="central",
    clip_norm=1.0,
    noise_multiplier=1.0,
    squared_sensitivity=1 << 24,
    epsilon=4.0,
    delta=1e-5,
    population="phones",
    population_size=1000,
)
MASKS = PrivacyFloor(protocol="secagg", threat="active", min_survivors=10)
NOISE = PrivacyFloor(mechanism="central", clip_norm=1.0, noise_multiplier=0.8)
KEY = PUBLISHER.public
OPTIONS: dict[str, bool | int | float | str] = {
    "threat": "active",
    "min_survivors": 10,
    "adversarial_fraction": 0.2,
    "security_bits": 40,
}
STRICT = PrivacyFloor(
    protocol="secagg", threat="active", min_survivors=10, adversarial_fraction=0.2, security_bits=40, authority=KEY
)


class NoTraining(FailingTrainer):
    """A trainer that must not train."""

    def __init__(self) -> None:
        super().__init__(fault=AssertionError("it trains"))


# What a floor demands.


@pytest.mark.parametrize(
    ("floor", "protocol", "terms", "fault"),
    [
        (MASKS, RoundPlan(), TERMS, "round protocol plain, expected secagg"),
        (STRICT, RoundPlan(protocol="secagg"), None, "threat model curious, expected at least active"),
        (STRICT, RoundPlan(protocol="secagg", options=OPTIONS | {"min_survivors": 9}), None, "survivors 9"),
        (STRICT, RoundPlan(protocol="secagg", options=OPTIONS | {"adversarial_fraction": 0.1}), None, "100000"),
        (MASKS, RoundPlan(protocol="secagg", options=OPTIONS), None, "active without an authority"),
        (NOISE, RoundPlan(), None, "no differential privacy, expected mechanism central, clip_norm 1"),
        (NOISE, RoundPlan(), replace(TERMS, clip_norm=1.5), "clip norm 1.5, expected at most 1"),
        (NOISE, RoundPlan(), replace(TERMS, noise_multiplier=0.5), "noise multiplier 0.5, expected at least 0.8"),
        (NOISE, RoundPlan(), replace(TERMS, mechanism="none"), "mechanism 'none', expected central"),
        (PrivacyFloor(mechanism="distributed"), RoundPlan(), TERMS, "mechanism 'central', expected distributed"),
        (PrivacyFloor(clip_norm=1.0), RoundPlan(), None, "no differential privacy, expected clip_norm 1"),
        (PrivacyFloor(epsilon=3.9), RoundPlan(), TERMS, "epsilon 4 of the budget, expected at most 3.9"),
        (PrivacyFloor(delta=1e-6), RoundPlan(), TERMS, "delta 1e-05 of the budget, expected at most 1e-06"),
        (PrivacyFloor(epsilon=4.0), RoundPlan(), None, "no differential privacy, expected epsilon 4"),
    ],
)
def test_less_than_the_floor_is_a_fault(
    floor: PrivacyFloor, protocol: RoundPlan, terms: m.PrivacyTerms | None, fault: str
) -> None:
    (text,) = floor.faults(protocol, terms)[:1]
    assert fault in text


def test_what_satisfies_the_floor_is_accepted() -> None:
    secagg = RoundPlan(protocol="secagg", options=OPTIONS)
    assert STRICT.tightened(NOISE).faults(secagg, TERMS) == ()
    assert STRICT.faults(secagg, None) == NOISE.faults(RoundPlan(), TERMS) == NO_FLOOR.faults(RoundPlan(), None) == ()
    assert PrivacyFloor(epsilon=4.0, delta=1e-5).faults(RoundPlan(), TERMS) == ()
    assert PrivacyFloor(mechanism="distributed").faults(secagg, replace(TERMS, mechanism="skellam")) == ()


def test_an_option_of_a_wrong_type_counts_as_its_weakest_value() -> None:
    secagg = RoundPlan(protocol="secagg", options=OPTIONS | {"threat": 3, "min_survivors": "10"})
    assert len(STRICT.faults(secagg, None)) == 2


def test_the_part_about_masks_is_that_of_secure_aggregation() -> None:
    masks = STRICT.masks
    assert NOISE.masks is None and masks is not None
    assert (masks.threat, masks.min_survivors, masks.adversarial_ppm) == (Threat.ACTIVE, 10, 200_000)
    assert (masks.security_bits, masks.authority) == (40, KEY)


def test_each_wrong_key_has_a_text() -> None:
    row = {"protcol": "secagg", "threat": "strong", "min_survivors": 2, "clip_norm": "1", "noise_multiplier": -1}
    with pytest.raises(InvalidInput, match="FN-1701") as caught:
        parse_floor(row, "policy.toml: privacy_floor")
    texts = str(caught.value).split("; policy.toml: ")
    assert len(texts) == len(row)
    assert "did you mean protocol?" in texts[0] and "from 3 to 1000000" in texts[2]


@pytest.mark.parametrize("row", [{"threat": "active"}, {"noise_multiplier": 1.0}, {"min_survivors": 3}])
def test_a_key_that_lacks_another_one_is_refused(row: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="FN-1701"):
        parse_floor(row, "policy")


def test_two_authorities_are_refused() -> None:
    with pytest.raises(InvalidInput, match="FN-1702"):
        STRICT.tightened(replace(STRICT, authority="ab" * 32))


# The manifest.


def floored(script: Script, folder: Path, floor: PrivacyFloor) -> Script:
    """Return the coordinator with the Bundle under a floor, as its publisher exports it."""
    bundle, name = script.bundle, "floored"
    artifacts = {each: bundle.artifact(each) for each in bundle.manifest.artifacts}
    write_bundle(folder / name, dump_manifest(replace(bundle.manifest, privacy_floor=floor)), artifacts, PUBLISHER)
    return offering(script, open_folder(folder / name, trusted=[PUBLISHER.public]))


def offering(script: Script, bundle: Bundle) -> Script:
    """Return the coordinator with another Bundle."""
    initial = bundle.manifest.artifacts["initial"]
    version = sign_version(PUBLISHER, parent=None, run_id="run", bundle_sha256=bundle.sha256, parameters=initial)
    script.bundle = bundle
    script.work = replace(script.work, bundle=ref_of(bundle.signed), version=version)
    return script


def test_a_manifest_keeps_its_floor(tmp_path: Path) -> None:
    script = scripted_coordinator(tmp_path)
    plain = dump_manifest(script.bundle.manifest)
    assert b"privacy_floor" not in plain
    manifest = replace(script.bundle.manifest, privacy_floor=STRICT.tightened(NOISE))
    assert parse_manifest(dump_manifest(manifest)) == manifest
    assert floor_row(parse_manifest(plain).privacy_floor) == {}


@pytest.mark.parametrize(
    "row",
    ['"privacy_floor": {}', '"privacy_floor": {"threat": "x"}', '"privacy_floor": 3', '"privacy_floor": {"a": 1}'],
)
def test_a_wrong_floor_in_a_manifest_is_refused(tmp_path: Path, row: str) -> None:
    data = dump_manifest(scripted_coordinator(tmp_path).bundle.manifest)
    with pytest.raises(InvalidBundle, match="FN-0308"):
        parse_manifest(data.replace(b'"batch_size"', row.encode() + b',\n "batch_size"'))


@pytest.mark.parametrize("edited", [b"{}", b'{"min_survivors": 3, "protocol": "secagg"}'])
def test_a_manifest_whose_floor_was_edited_is_refused_by_its_signature(tmp_path: Path, edited: bytes) -> None:
    script = floored(scripted_coordinator(tmp_path), tmp_path, MASKS)
    signed = read_signed_manifest(tmp_path / "floored")
    begin = signed.data.index(b'"privacy_floor": ') + len(b'"privacy_floor": ')
    end = signed.data.index(b"}", begin) + 1
    data = signed.data[:begin] + edited + signed.data[end:]
    script.bundle.signed = SignedManifest(data=data, public_key=signed.public_key, signature=signed.signature)
    script.work = replace(script.work, bundle=ref_of(script.bundle.signed))
    run(script, tmp_path, NoTraining())
    (failure,) = script.failures
    assert failure.endswith("[FN-0302]")
    assert script.headers == []


# The device.


def downloaded(script: Script) -> int:
    """Return the number of bytes that the coordinator has sent."""
    return sum(script.served_bytes.values())


CASES = [
    (MASKS, None, "round protocol plain"),
    (NOISE, None, "no differential privacy"),
    (NOISE, replace(TERMS, clip_norm=2.0), "clip norm 2"),
    (NOISE, replace(TERMS, noise_multiplier=0.1), "noise multiplier 0.1"),
]
NAMES = ["no masks", "no mechanism", "clip above", "noise below"]


@pytest.mark.parametrize(("floor", "terms", "fault"), CASES, ids=NAMES)
def test_a_device_refuses_less_than_its_owner_allows_before_it_downloads(
    tmp_path: Path, floor: PrivacyFloor, terms: m.PrivacyTerms | None, fault: str
) -> None:
    script = scripted_coordinator(tmp_path)
    script.work = replace(script.work, privacy=terms)
    write_policy(tmp_path / "device", floor)
    run(script, tmp_path, NoTraining())
    (failure,) = script.failures
    assert fault in failure and "of the device's owner" in failure and failure.endswith("[FN-1700]")
    assert script.calls["download"] == script.calls["upload"] == 0
    run_of = read_ledger(tmp_path / "device").runs["run"]
    assert (run_of.num_refused, run_of.num_rounds) == (1, 0) and fault in run_of.refusal


@pytest.mark.parametrize(("floor", "terms", "fault"), CASES, ids=NAMES)
def test_a_device_refuses_less_than_the_manifest_says_before_it_downloads_the_model(
    tmp_path: Path, floor: PrivacyFloor, terms: m.PrivacyTerms | None, fault: str
) -> None:
    script = floored(scripted_coordinator(tmp_path), tmp_path, floor)
    script.work = replace(script.work, privacy=terms)
    run(script, tmp_path, NoTraining())
    (failure,) = script.failures
    assert fault in failure and "of the bundle's manifest" in failure and failure.endswith("[FN-1700]")
    assert set(script.served_bytes) == {ref.sha256 for ref in script.work.bundle.manifest.chunks}
    assert script.headers == []
    assert read_ledger(tmp_path / "device").runs["run"].floor == floor_row(floor)


def private(work: m.Assignment, terms: m.PrivacyTerms = TERMS) -> m.Assignment:
    """Return an Assignment with these terms, as an honest coordinator makes it."""
    grid = ClipGrid.of(terms.clip_norm, work.codec.bits, sum(math.prod(shape) for shape in SHAPES.values()))
    return replace(
        work,
        privacy=replace(terms, squared_sensitivity=grid.squared_sensitivity),
        codec=replace(work.codec, max_shift=0),
        grid=(grid.exponent,) * len(SHAPES),
        statistics=(replace(work.statistics[0], bound=1),),
    )


def test_an_owner_cannot_loosen_the_floor_of_a_manifest(tmp_path: Path) -> None:
    script = floored(scripted_coordinator(tmp_path), tmp_path, NOISE)
    script.work = private(script.work, replace(TERMS, clip_norm=2.0))
    write_policy(tmp_path / "device", PrivacyFloor(clip_norm=100.0))
    run(script, tmp_path, NoTraining())
    assert "clip norm 2, expected at most 1" in script.failures[0]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"statistics": (Statistic(name=m.EXAMPLES, bound=2),)}, "examples without noise"),
        ({"statistics": (Statistic(name=m.EXAMPLES, bound=1), Statistic(name="steps", bound=9))}, "steps without"),
        ({"range_examples": 8}, "ranges of activations without noise"),
    ],
    ids=["weight", "statistic", "ranges"],
)
def test_a_device_under_a_floor_with_noise_sends_nothing_beside_the_noised_sum(
    tmp_path: Path, change: dict[str, Any], fault: str
) -> None:
    script = scripted_coordinator(tmp_path)
    script.work = replace(private(script.work), **change)
    write_policy(tmp_path / "device", NOISE)
    run(script, tmp_path, NoTraining())
    assert fault in script.failures[0] and script.failures[0].endswith("[FN-1700]")


def test_a_device_that_gets_enough_takes_part(tmp_path: Path) -> None:
    script = floored(scripted_coordinator(tmp_path), tmp_path, NOISE)
    script.work = private(script.work)
    write_policy(tmp_path / "device", PrivacyFloor(clip_norm=1.0))
    assert run(script, tmp_path).num_accepted == 1
    ledger = read_ledger(tmp_path / "device")
    entry = ledger.runs["run"]
    assert (entry.num_rounds, entry.num_bare, entry.mechanism, entry.sent) == (1, 0, "central", ("examples",))
    assert (entry.clip_norm, entry.noise_multiplier, entry.floor) == (1.0, 1.0, floor_row(NOISE))
    # A release of noise multiplier 1 has a loss of 1/2 zCDP.
    assert entry.epsilon == ledger.total.epsilon == Loss(rho=Fraction(1, 2)).epsilon(TERMS.delta)


class Killed(BaseException):
    """The end of a process. No code catches it."""


def test_a_tightened_policy_holds_for_a_stored_update(tmp_path: Path) -> None:
    script, upload = scripted_coordinator(tmp_path), Script.upload

    def killed(header: m.UpdateHeader, read: ReadPayload) -> m.UploadReply:
        raise Killed

    script.upload = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        run(script, tmp_path)
    assert list((tmp_path / "device" / "updates").iterdir())
    script.upload = partial(upload, script)  # type: ignore[method-assign]
    write_policy(tmp_path / "device", MASKS)
    run(script, tmp_path, NoTraining())
    assert script.failures[0].endswith("[FN-1700]") and script.headers == []


def test_a_policy_that_is_tightened_during_the_training_keeps_the_update_on_the_device(tmp_path: Path) -> None:
    class Tightening(SyntheticTrainer):
        def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
            write_policy(tmp_path / "device", MASKS)
            return super().train(model, assignment, should_continue)

    script = scripted_coordinator(tmp_path)
    run(script, tmp_path, Tightening(partition=0))
    assert script.failures[0].endswith("[FN-1700]") and script.calls["upload"] == 0
    assert read_ledger(tmp_path / "device").total.num_rounds == 0


def test_a_changed_policy_holds_for_the_next_assignment_without_a_restart(tmp_path: Path) -> None:
    script = scripted_coordinator(tmp_path)
    client = client_of(script, tmp_path, max_updates=2)
    upload = Script.upload

    def tighten(header: m.UpdateHeader, read: ReadPayload) -> m.UploadReply:
        write_policy(tmp_path / "device", MASKS)
        return upload(script, header, read)

    script.upload = tighten  # type: ignore[method-assign]
    client.run()
    assert client.num_accepted == len(script.headers) == 1
    assert script.failures[0].endswith("[FN-1700]")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[privacy_floor]\nprotocol = 'secag'", "FN-1701"),
        ("[privacy]\nprotocol = 'secagg'", "FN-1701"),
        ("privacy_floor = 3", "FN-1701"),
        ("not TOML", "FN-1704"),
        ("#" * (65 << 10), "FN-1704"),
        ("\0", "FN-1704"),
    ],
)
def test_a_device_takes_part_in_nothing_while_its_policy_is_wrong(tmp_path: Path, text: str, code: str) -> None:
    script, folder = scripted_coordinator(tmp_path), tmp_path / "device"
    folder.mkdir()
    (folder / POLICY_FILE).write_text(text)
    run(script, tmp_path, NoTraining())
    assert script.failures[0].endswith(f"[{code}]") and downloaded(script) == 0
    # The coordinator learns no path of this machine.
    assert str(tmp_path) not in script.failures[0]


def test_a_policy_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / POLICY_FILE).mkdir()
    with pytest.raises(InvalidInput, match="FN-1704"):
        read_policy(tmp_path)


@pytest.mark.parametrize("floor", [NO_FLOOR, STRICT.tightened(NOISE), PrivacyFloor(clip_norm=1e-30)])
def test_a_written_policy_is_read_back(tmp_path: Path, floor: PrivacyFloor) -> None:
    write_policy(tmp_path, floor)
    assert read_policy(tmp_path) == floor
    assert (tmp_path / POLICY_FILE).stat().st_mode & 0o077 == 0
