"""From what training changed to an Update that its coordinator takes."""

from dataclasses import replace

import numpy as np
import pytest
from support.errors import raises
from support.values import GRID, TABLE, assignment, parameters

from fanin.clients.device.updates import Change, make_update
from fanin.edge.codecs.fixed import largest_value
from fanin.edge.tensors import TensorTable
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidUpdate
from fanin.server.fleet.validation import Expected, check_header

WORK = assignment()
TELEMETRY = m.Telemetry(runtime="synthetic 1", train_s=2.0)


def change_of(values: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> Change:
    return Change(values=values, counts={m.EXAMPLES: 12, m.TRAIN_LOSS: 99})


def test_an_update_says_what_it_is_and_its_coordinator_takes_it() -> None:
    header, payload = make_update(WORK, TABLE, change_of(parameters(2.0**-20)), TELEMETRY)
    assert header == m.UpdateHeader(
        format=m.UPDATE_FORMAT,
        assignment_id=WORK.assignment_id,
        run_id="run",
        round=1,
        version_sha256=WORK.version.sha256,
        codec="fixed32",
        shifts=(0, 0, 0),
        payload=artifact_of(payload),
        statistics=m.Statistics(counts={m.EXAMPLES: 12, m.TRAIN_LOSS: 99, m.ROUNDED: 0, m.SATURATED: 0}),
        telemetry=TELEMETRY,
    )
    check_header(
        header,
        Expected(
            run_id="run",
            round=1,
            version_sha256=WORK.version.sha256,
            codec=WORK.codec,
            table=TABLE,
            num_labels=2,
            statistics=WORK.statistics,
        ),
    )


def test_the_payload_is_the_change_in_grid_steps() -> None:
    change = parameters(2.0**-20)
    _, payload = make_update(WORK, TABLE, change_of(change), TELEMETRY)
    blocks = TABLE.views(np.frombuffer(payload, "<i4").astype(np.float64))
    for (name, steps), exponent in zip(blocks.items(), GRID, strict=True):
        assert (steps * 2.0**exponent == TABLE.views(change)[name]).all()


def int8_work(max_shift: int = 12) -> m.Assignment:
    return replace(WORK, codec=m.CodecSpec(name="int8", max_shift=max_shift))


def test_an_int8_update_has_a_byte_a_value_and_is_made_alike_again() -> None:
    change = parameters(1e-6)
    header, payload = make_update(int8_work(), TABLE, change_of(change), TELEMETRY)
    assert len(payload) == header.payload.size_bytes == TABLE.num_values
    assert header.statistics.counts[m.ROUNDED] > 0
    assert make_update(int8_work(), TABLE, change_of(change.copy()), TELEMETRY) == (header, payload)


def test_other_changes_and_other_rounds_round_otherwise() -> None:
    # Half a step each: which way a value goes is chance alone.
    table = TensorTable.of({"a": (256,)})
    step = 2.0 ** GRID[0]
    work = replace(int8_work(0), grid=GRID[:1])
    halves = np.full(256, 0.5 * step, np.float32)
    others = np.append(halves[:-1], np.float32(0.25 * step))
    payloads = [
        make_update(each, table, change_of(change), TELEMETRY)[1]
        for each, change in (
            (work, halves),
            (work, others),
            (replace(work, round=2), halves),
            (replace(work, training=replace(work.training, seed=8)), halves),
        )
    ]
    ups = [np.frombuffer(payload, "<i1")[:-1] for payload in payloads]
    assert all(set(up.tolist()) == {0, 1} for up in ups)
    for index, up in enumerate(ups):
        assert all((up != other).mean() > 0.3 for other in ups[index + 1 :])


def test_what_was_rounded_and_cut_is_counted() -> None:
    change = np.zeros(TABLE.num_values, np.float32)
    change[0], change[1] = 2.0**20, 2.0**-40
    header, payload = make_update(WORK, TABLE, change_of(change), TELEMETRY)
    assert header.shifts == (2, 0, 0)
    assert header.statistics.counts[m.SATURATED] == 1
    assert header.statistics.counts[m.ROUNDED] == 1
    assert np.frombuffer(payload, "<i4")[0] == largest_value(32)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_training_that_diverged_makes_no_update(value: float) -> None:
    change = parameters()
    change[3] = value
    with raises(ValueError, "update: got NaN or infinity, expected finite values; the training diverged"):
        make_update(WORK, TABLE, change_of(change), TELEMETRY)


def test_an_unknown_codec_makes_no_update() -> None:
    work = replace(WORK, codec=m.CodecSpec(name="int4", max_shift=0))
    with raises(InvalidUpdate, "codec: got 'int4', expected one of ['fixed32', 'int8']"):
        make_update(work, TABLE, change_of(parameters()), TELEMETRY)
