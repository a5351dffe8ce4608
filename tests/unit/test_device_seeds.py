"""The secret of a device, and the seeds that its own code draws from."""

import hashlib
import hmac
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from support.scripted import Script, run, scripted_coordinator
from support.values import assignment

from fanin.clients import app_seed
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.storage.seeds import DOMAIN, device_seed
from fanin.clients.device.updates import Change
from fanin.protos import messages as m
from fanin.protos.errors import Unavailable
from fanin.protos.wire import to_proto
from fanin.simulation import SyntheticTrainer
from fanin.v1 import fleet_pb2

SECRET = bytes(range(32))
WORK = assignment()


@dataclass
class DrawingTrainer:
    """A trainer of one's own that records the seed of its draws."""

    seeds: list[int] = field(default_factory=list)
    runtime: str = "drawing 1"
    graph_format: str = "onnx"

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        self.seeds.append(app_seed(model, assignment, 0))
        return SyntheticTrainer(partition=0).train(model, assignment, should_continue)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return scripted_coordinator(tmp_path)


def hkdf(secret: bytes, info: bytes) -> bytes:
    """Return the first block of HKDF-SHA256 without salt, as RFC 5869 defines it."""
    key = hmac.digest(bytes(32), secret, hashlib.sha256)
    return hmac.digest(key, info + b"\x01", hashlib.sha256)


def test_a_seed_is_the_hkdf_of_the_secret_over_the_assignment() -> None:
    info = DOMAIN + to_proto(replace(WORK, deadline_s=0.0), fleet_pb2.Assignment).SerializeToString(deterministic=True)
    assert device_seed(SECRET, WORK) == hkdf(SECRET, info)
    assert device_seed(SECRET, replace(WORK, deadline_s=7.0)) == device_seed(SECRET, WORK)


@pytest.mark.parametrize(
    "other",
    [
        replace(WORK, run_id="another"),
        replace(WORK, round=WORK.round + 1),
        replace(WORK, assignment_id="another"),
        replace(WORK, state=replace(WORK.state, lineage=WORK.state.lineage + 1)),
        replace(WORK, version=replace(WORK.version, number=WORK.version.number + 1)),
        replace(WORK, training=replace(WORK.training, learning_rate=0.25)),
    ],
    ids=["run", "round", "id", "lineage", "version", "training"],
)
def test_another_assignment_has_another_seed(other: m.Assignment) -> None:
    assert device_seed(SECRET, other) != device_seed(SECRET, WORK)
    assert device_seed(bytes(32), WORK) != device_seed(SECRET, WORK)


def test_two_devices_draw_differently_and_a_restarted_one_draws_the_same(script: Script, tmp_path: Path) -> None:
    one, other, again = DrawingTrainer(), DrawingTrainer(), DrawingTrainer()
    for folder, trainer in (("one", one), ("other", other)):
        assert run(script, tmp_path / folder, trainer).num_accepted == 1
    run(script, tmp_path / "one", again)
    assert one.seeds == again.seeds != other.seeds
    assert min(one.seeds + other.seeds).bit_length() > 200


def test_a_simulated_device_draws_from_the_plan(script: Script) -> None:
    model = OpenedModel(bundle=script.bundle, parameters=script.bundle.initial_parameters())
    expected = np.random.SeedSequence((WORK.training.seed, 3, WORK.round)).generate_state(1)[0]
    assert app_seed(model, WORK, 3) == expected


def test_the_secret_exists_before_the_first_call_and_only_its_owner_reads_it(script: Script, tmp_path: Path) -> None:
    script.faults["enroll"] = Unavailable("no line")
    run(script, tmp_path)
    path = tmp_path / "device" / "device.secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert bytes.fromhex(path.read_text()) == Cache(tmp_path / "device").secret
    assert len(Cache(tmp_path / "device").secret) == 32


@pytest.mark.parametrize("damage", [None, b"", b"00" * 31, b"\xff" * 64])
def test_a_device_that_lost_its_secret_says_so_and_gets_a_new_one(
    script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes | None
) -> None:
    before, after = DrawingTrainer(), DrawingTrainer()
    with caplog.at_level(logging.WARNING):
        run(script, tmp_path, before)
        assert "secret" not in caplog.text, "a new device has lost nothing"
        path = tmp_path / "device" / "device.secret"
        path.unlink() if damage is None else path.write_bytes(damage)
        run(script, tmp_path, after)
    assert caplog.text.count("device.secret: the secret of this device is lost; a new one is created") == 1
    assert before.seeds != after.seeds


def test_the_secret_and_the_seed_are_in_no_text_of_a_model(script: Script) -> None:
    model = OpenedModel(bundle=script.bundle, parameters=script.bundle.initial_parameters(), device_seed=SECRET)
    assert "device_seed" not in repr(model)
