"""A folder of a coordinator with a long record, written row by row: for the page, which must stay fast.

    long_record.py FOLDER NUM_ROUNDS NUM_DEVICES

The Run ``long`` has finished. Its rows have the form of real ones, and its Versions all have the first parameters.
"""

import asyncio
import hashlib
import json
import math
import random
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

from fanin.protos import messages as m
from fanin.protos.calls import device_id_of
from fanin.protos.wire import to_proto
from fanin.simulation import synthetic_bundle
from fanin.simulation.federation.federation import start_run
from fanin.v1 import control_pb2, fleet_pb2
from support.federations import plan
from support.virtual import PUBLISHER, SHAPES, open_place

RUN: Final = "long"
STARTED_S: Final = 1_790_000_000.0
ROUND_S: Final = 30.0
NUM_ACCEPTED: Final = 4
BATCH: Final = 5000


def write_record(folder: Path, num_rounds: int, num_devices: int) -> None:
    """Write the record of a Run with this many Rounds, at a coordinator with this many devices, in FOLDER/state."""
    # A new authority may be created there.
    (folder / "state" / "tls").mkdir(parents=True)
    version = asyncio.run(_begun(folder, num_rounds))
    devices = [device_id_of(_key(index)) for index in range(num_devices)]
    with closing(sqlite3.connect(folder / "state" / "fanin.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("BEGIN")
        connection.executemany(
            "INSERT OR IGNORE INTO devices (device_id, public_key, enrolled_at, last_seen) VALUES (?, ?, ?, ?)",
            ((device, _key(index), STARTED_S, STARTED_S + index) for index, device in enumerate(devices)),
        )
        rows = ["INSERT INTO rounds (run_id, round, base_version, grid, state, opened_at, accepted, next_grid)"]
        rows.append("VALUES (?, ?, ?, '[-20, -18]', 'published', ?, ?, '[-20, -18]')")
        connection.executemany(" ".join(rows), _rounds(num_rounds, devices))
        columns = "(run_id, number, version_proto, round, published_at)"
        connection.executemany(f"INSERT INTO versions {columns} VALUES (?, ?, ?, ?, ?)", _versions(version, num_rounds))
        connection.execute("DELETE FROM events WHERE run_id = ?", (RUN,))
        connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", _events(version, num_rounds, devices))
        connection.execute("UPDATE runs SET state = 'finished', reason = '' WHERE run_id = ?", (RUN,))
        connection.execute("COMMIT")


async def _begun(folder: Path, num_rounds: int) -> m.Version:
    place = open_place(folder)
    bundle = synthetic_bundle(folder / "bundle", PUBLISHER, SHAPES)
    await start_run(place.runs, RUN, replace(plan(num_rounds), name=RUN), bundle, PUBLISHER)
    version = await place.state.stores.runs.newest_version(RUN)
    await place.coordinator.stop()
    await place.runs.stop()
    with closing(sqlite3.connect(folder / "state" / "fanin.db")) as connection, connection:
        connection.execute("DELETE FROM rounds")
    return version


def _key(index: int) -> str:
    return hashlib.sha256(str(index).encode()).hexdigest()


def _accepted(number: int, devices: list[str]) -> list[str]:
    rng = random.Random(number)
    return [rng.choice(devices) for _ in range(NUM_ACCEPTED)] if devices else []


def _rounds(num_rounds: int, devices: list[str]):
    for number in range(1, num_rounds + 1):
        yield RUN, number, number - 1, _opened(number), json.dumps(_accepted(number, devices))


def _opened(number: int) -> float:
    return STARTED_S + number * ROUND_S


def _versions(version: m.Version, num_rounds: int):
    for number in range(1, num_rounds + 1):
        row = replace(version, number=number, parent=number - 1)
        yield RUN, number, to_proto(row, fleet_pb2.Version).SerializeToString(), number, _opened(number) + 27.5


def _events(version: m.Version, num_rounds: int, devices: list[str]):
    sequence = 0
    for number in range(1, num_rounds + 1):
        opened = _opened(number)
        accepted = tuple(_accepted(number, devices))
        for after_s, event in (
            (0.0, m.RoundOpened(round=number, base_version=number - 1)),
            (25.0, m.RoundClosed(round=number, num_accepted=len(accepted), accepted=accepted)),
            (27.5, _publication(version, number)),
        ):
            sequence += 1
            logged = m.LoggedEvent(sequence=sequence, time=opened + after_s, event=event)
            yield RUN, sequence, logged.time, to_proto(logged, control_pb2.Event).SerializeToString()


def _publication(version: m.Version, number: int) -> m.VersionPublished:
    rng = random.Random(number)
    loss = 2.3 * math.exp(-number / 12) + 0.25 + rng.random() * 0.05
    accuracy = 0.97 - 0.85 * math.exp(-number / 9) + rng.random() * 0.01
    spread = {
        "validation_loss": _spread(loss, 0.2, rng),
        "validation_accuracy": _spread(accuracy, 0.03, rng),
        "train_loss": _spread(loss * 0.95, 0.2, rng),
    }
    return m.VersionPublished(
        number=number,
        version_sha256=version.sha256,
        parent=number - 1,
        round=number,
        round_s=27.5,
        bytes_down=NUM_ACCEPTED * 412_000,
        bytes_up=NUM_ACCEPTED * 104_000 + rng.randrange(4000),
        train_loss=loss * 0.95,
        train_loss_examples=400,
        total_examples=400,
        evaluation=m.Evaluation(
            num_examples=80,
            loss=loss,
            accuracy_float=accuracy,
            accuracy_int8=accuracy - 0.012,
            int8_agreement=0.98,
            num_labels=80,
        ),
        runtimes={"onnx 1.31.0": 3, "litert 2.3.0": 1},
        device_spreads=spread,
        times=m.RoundTimes(
            num_devices=NUM_ACCEPTED,
            wait_s=4 + 6 * rng.random(),
            download_s=3.0,
            train_s=12.0,
            upload_s=3.5,
            fold_s=2.5,
        ),
    )


def _spread(mean: float, width: float, rng: random.Random) -> m.DeviceSpread:
    low, high = mean - width * rng.random(), mean + width * rng.random()
    return m.DeviceSpread(
        num_devices=NUM_ACCEPTED, mean=mean, min=low - 0.1, p10=low, median=mean, p90=high, max=high + 0.1
    )


if __name__ == "__main__":
    write_record(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
