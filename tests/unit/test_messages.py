"""Messages validate themselves on construction: one case for each rule."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.errors import raises
from support.values import BUNDLE, DELEGATION, assignment, plan, update, version

from fanin.edge.bundles.keys import SigningKey
from fanin.protos import messages as m
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.messages import Adopt
from fanin.protos.names import SMALL_ORDER, check_key, check_name
from fanin.protos.plans.keys import PAGE

BAD_NAMES = ("", ".", "..", ".hidden", "a/b", "a\\b", "a b", "a\n", "\u00e9", "\u0661", "x" * 129, "a\0b")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    text = f"run: got {name[:128]!r}, expected 1 to 128 letters, digits or ._:+- that do not begin with a dot"
    with raises(InvalidInput, text):
        check_name("run", name)


@pytest.mark.parametrize("name", ["a", "A.b_c:d+e-f", "1" * 128, "_", "onnxruntime-1.31.1"])
def test_good_names_pass(name: str) -> None:
    check_name("run", name)


PRIME = 2**255 - 19
D = -121665 * pow(121666, -1, PRIME) % PRIME


def on_curve(encoding: bytes) -> tuple[int, int]:
    """Decode a point (x, y) as in RFC 8032, section 5.1.3, but with any y and either sign."""
    y = (int.from_bytes(encoding, "little") & ((1 << 255) - 1)) % PRIME
    square = (y * y - 1) * pow(D * y * y + 1, -1, PRIME) % PRIME
    x = pow(square, (PRIME + 3) // 8, PRIME)
    if x * x % PRIME != square:
        x = x * pow(2, (PRIME - 1) // 4, PRIME) % PRIME
    assert x * x % PRIME == square
    return (PRIME - x if encoding[31] >> 7 else x) % PRIME, y


def doubled(point: tuple[int, int]) -> tuple[int, int]:
    """Return the sum of a point with itself on the twisted Edwards curve with a = -1."""
    x, y = point
    both = D * x * x * y * y
    return (
        2 * x * y * pow(1 + both, -1, PRIME) % PRIME,
        (y * y + x * x) * pow(1 - both, -1, PRIME) % PRIME,
    )


def test_the_points_of_small_order_are_all_refused() -> None:
    points = set()
    for name in SMALL_ORDER:
        for sign in (0, 0x80):
            encoding = bytes.fromhex(name[:-2]) + bytes([int(name[-2:], 16) | sign])
            point = on_curve(encoding)
            assert doubled(doubled(doubled(point))) == (0, 1)
            points.add(point)
            with raises(
                InvalidInput, f"key: got the public key {encoding.hex()}, a point of small order; create a new key"
            ):
                check_key("key", encoding.hex())
    # The points whose order divides 8 form a group of 8.
    assert len(points) == 8


def test_a_device_key_passes() -> None:
    for _ in range(20):
        check_key("key", SigningKey.generate().public)


HEADER, _ = update(assignment())
NAME_RULE = "expected 1 to 128 letters, digits or ._:+- that do not begin with a dot"
KEY_RULE = "expected 64 hexadecimal ones"

REFUSED: list[tuple[Callable[[], object], str]] = [
    (
        lambda: m.Enrollment(protocol=1, token="t", public_key="ab"),
        f"enroll: got a public key of 2 characters, {KEY_RULE}",
    ),
    (
        lambda: m.Enrollment(protocol=1, token="t", public_key="Z" * 64),
        f"enroll: got a public key of 64 characters, {KEY_RULE}",
    ),
    (
        lambda: m.Enrollment(protocol=1, token="t", public_key="01" + "00" * 31),
        f"enroll: got the public key 01{'00' * 31}, a point of small order; create a new key",
    ),
    (lambda: replace(BUNDLE, public_key=""), f"bundle: got a public key of 0 characters, {KEY_RULE}"),
    (lambda: replace(BUNDLE, signature=b"x"), "bundle: got a signature of 1 bytes, expected 64"),
    (lambda: replace(DELEGATION, run_id="a/b"), f"delegation: run: got 'a/b', {NAME_RULE}"),
    (lambda: replace(DELEGATION, run_public_key=""), f"delegation: got a public key of 0 characters, {KEY_RULE}"),
    (lambda: replace(DELEGATION, signature=b""), "delegation: got a signature of 0 bytes, expected 64"),
    (lambda: replace(version(), run_id=""), f"version: run: got '', {NAME_RULE}"),
    (lambda: replace(version(), public_key="a"), f"version: got a public key of 1 characters, {KEY_RULE}"),
    (lambda: replace(version(), signature=bytes(65)), "version: got a signature of 65 bytes, expected 64"),
    (lambda: replace(version(), number=3, parent=3), "version 3: got parent 3, expected a lower number (0: itself)"),
    (
        lambda: replace(version(), number=2**63, parent=0),
        f"version: got number {2**63}, expected 0 to {2**63 - 1}",
    ),
    (
        lambda: Adopt(from_run_id="\x1b[2J", number=1),
        f"adopt: run: got '\\x1b[2J', {NAME_RULE}",
    ),
    (lambda: replace(version(), number=0, parent=1), "version 0: got parent 1, expected a lower number (0: itself)"),
    (lambda: replace(assignment(), assignment_id=".."), f"assignment: got '..', {NAME_RULE}"),
    (lambda: replace(assignment(), run_id="a/b"), f"assignment: run: got 'a/b', {NAME_RULE}"),
    *(
        (
            lambda exponent=exponent: replace(assignment(), grid=(0, exponent)),
            f"assignment: got grid exponent {exponent}, expected -1000 to 1000",
        )
        for exponent in (-1001, 1001)
    ),
    *(
        (
            lambda shift=shift: replace(assignment(), codec=m.CodecSpec(name="fixed32", max_shift=shift)),
            f"assignment: got max_shift {shift}, expected 0 to 62",
        )
        for shift in (-1, 63)
    ),
    *(
        (
            lambda epochs=epochs: replace(assignment(), training=replace(assignment().training, epochs=epochs)),
            f"assignment: training.epochs: got {epochs}, expected an integer from 1 to 10000; {PAGE} describes the key",
        )
        for epochs in (0, 10_001)
    ),
    *(
        (
            lambda rate=rate: replace(assignment(), training=replace(assignment().training, learning_rate=rate)),
            (
                f"assignment: training.learning_rate: got {rate}, expected a number from 1.2e-38 to 1.7e+38; "
                f"{PAGE} describes the key"
            ),
        )
        for rate in (1e-39, -1.0, float("inf"), float("nan"))
    ),
    *(
        (
            lambda key=key: replace(CAPABILITIES, **{key: ("x",) * 17}),
            f"capabilities: got 17 {key}, expected at most 16",
        )
        for key in ("codecs", "runtimes", "graph_formats")
    ),
    *(
        (
            lambda entry=entry: replace(CAPABILITIES, runtimes=(entry,)),
            f"capabilities: got {entry[:128]!r} among runtimes, expected 1 to 128 printable characters",
        )
        for entry in ("", "x" * 129, "a\nb", "a\0b")
    ),
    (lambda: replace(HEADER, assignment_id="a/b"), f"update: assignment: got 'a/b', {NAME_RULE}"),
    (
        lambda: m.CheckIn(protocol=1, capabilities=CAPABILITIES, wait_s=float("nan")),
        "check-in: got wait_s nan, expected a finite number of at least 0",
    ),
    (
        lambda: m.CheckIn(protocol=1, capabilities=CAPABILITIES, wait_s=-1.0),
        "check-in: got wait_s -1.0, expected a finite number of at least 0",
    ),
    (
        lambda: m.Wait(retry_min_s=2.0, retry_max_s=1.0),
        "wait: got a window of 2.0 to 1.0 s, expected 0 <= retry_min_s <= retry_max_s < infinity",
    ),
    (
        lambda: m.Wait(retry_min_s=0.0, retry_max_s=float("inf")),
        "wait: got a window of 0.0 to inf s, expected 0 <= retry_min_s <= retry_max_s < infinity",
    ),
    (
        lambda: m.Statistics(counts={f"n{index}": 1 for index in range(65)}),
        "statistics: got 65 counts, expected at most 64",
    ),
    (lambda: m.Statistics(counts={"a b": 1}), f"statistics: got 'a b', {NAME_RULE}"),
    (
        lambda: m.Statistics(counts={"n": -m.MAX_SUM - 1}),
        f"statistics: got n = {-m.MAX_SUM - 1}, expected at most {m.MAX_SUM} in magnitude",
    ),
    (lambda: m.Telemetry(runtime="x" * 129), "telemetry: got a name of 129 characters, expected at most 128"),
    (lambda: m.Telemetry(fanin_version="x" * 200), "telemetry: got a name of 200 characters, expected at most 128"),
    (
        lambda: m.Telemetry(runtime="onnx\n1"),
        "telemetry: got the name 'onnx\\n1', expected printable characters",
    ),
    (
        lambda: m.Report(assignment_id="run.1.a", failure="x" * 4097),
        "report: got a failure of 4097 characters, expected at most 4096",
    ),
    (
        lambda: m.Telemetry(train_s=float("nan")),
        "telemetry: got train_s nan, expected a finite number of at least 0",
    ),
    (
        lambda: m.Telemetry(bytes_downloaded=m.MAX_COUNT + 1),
        f"telemetry: got bytes_downloaded {m.MAX_COUNT + 1}, expected at least 0 and at most {m.MAX_COUNT}",
    ),
]
CAPABILITIES = m.Capabilities(codecs=("fixed32",), runtimes=(), graph_formats=("onnx",))


@pytest.mark.parametrize(("make", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_a_value_that_breaks_a_rule_is_never_created(make: Callable[[], object], text: str) -> None:
    with raises(InvalidInput, text):
        make()


def test_a_runtime_is_named_with_its_version() -> None:
    assert replace(CAPABILITIES, runtimes=("onnxruntime 1.31.1",) * 16).runtimes[0] == "onnxruntime 1.31.1"


def test_a_versions_name_is_the_digest_of_its_parameters() -> None:
    assert version().sha256 == version().parameters.sha256


@pytest.mark.parametrize("buffer", [1, 64, 65, 1_000, 1_000_000])
def test_the_sum_of_a_statistic_over_a_round_fits_an_int64(buffer: int) -> None:
    run_plan = replace(plan(), cohort=replace(plan().cohort, concurrency=buffer, buffer=buffer, quorum=1))
    largest = run_plan.max_sum
    assert m.MAX_COUNT <= largest <= m.MAX_SUM and buffer * largest < 1 << 63
    assert replace(run_plan, statistics=(m.Statistic(name="words", bound=largest),)).statistics
    if largest < m.MAX_SUM:
        text = f"plan: statistics: got the bound {largest + 1} of 'words' with a buffer of {buffer}, expected at most"
        with pytest.raises(InvalidPlan, match=text):
            replace(run_plan, statistics=(m.Statistic(name="words", bound=largest + 1),))
