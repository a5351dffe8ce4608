"""A Run from an untrained module, with devices of two formats: its int8 model has the ranges of each Version."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.commands import Fanin, fanin_in_process
from support.fresh_digits import DATA, RUNTIMES, accuracy, digits_app, take_part
from support.hosted import Hosted
from support.models import PUBLISHER, export_bundle
from support.plain_files import in_litert, in_onnxruntime
from support.values import plan

from fanin.clients.data.npz import write_npz
from fanin.clients.device.serving import Serving
from fanin.clients.device.storage.cache import Cache
from fanin.edge.runtimes.available import open_format
from fanin.protos.plans import Int8Plan, Training

pytestmark = pytest.mark.heavy
NUM_ROUNDS = 5


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


def test_every_part_predicts_with_the_ranges_of_its_version(tmp_path: Path, fanin: Fanin) -> None:
    host = Hosted(tmp_path).start()
    try:
        bundle = export_bundle(digits_app(), ("onnx", "tflite"))
        training = Training(epochs=3, learning_rate=0.04, seed=7)
        run_plan = replace(
            plan(buffer=len(RUNTIMES), max_rounds=NUM_ROUNDS), training=training, int8=Int8Plan(ranges="devices")
        )
        host.start_run(run_plan, bundle, PUBLISHER)
        with ThreadPoolExecutor(len(RUNTIMES)) as pool:
            servings = list(
                pool.map(lambda device: take_part(host, host.folder, device, NUM_ROUNDS), range(len(RUNTIMES)))
            )
        assert [event.number for event in host.published_versions()] == [1, 2, 3, 4, 5]
        (host.state / "tokens").mkdir()
        (host.state / "tokens" / "operator.token").write_text(host.operator_token)
        (host.state / "address").write_text(host.address)
        folder, x = tmp_path / "fetched", {"x": DATA.test.inputs["x"]}
        files = {name: tmp_path / f"model.{name}" for name in ("onnx", "tflite")}
        options = [word for name, path in files.items() for word in (f"--{name}", path)]
        outcome = fanin("fetch", "run", "--state", host.state, "--out", folder, "--bundle", *options, "--json")
        assert outcome.status == 0, outcome
        outcome = fanin("fetch", "run", "--state", host.state, "--out", tmp_path / "version.npz")
        assert "note: the file has no ranges of activations" in outcome.err
    finally:
        host.stop()
    assert list(json.loads((folder / "version.json").read_text())["auxiliary_sha256"]) == ["ranges"]

    write_npz(tmp_path / "test.npz", DATA.test)
    words = ("infer", folder / "bundle", "--data", tmp_path / "test.npz", "--out", tmp_path / "logits.npy")
    outcome = fanin(*words, "--version", folder / "parameters")
    assert outcome.status == 0, outcome
    fresh = accuracy(np.load(tmp_path / "logits.npy"))
    assert fresh > 0.8
    # The plain files and the command have one model.
    assert accuracy(in_onnxruntime(files["onnx"].read_bytes(), x["x"])) == fresh
    assert accuracy(in_litert(files["tflite"].read_bytes(), x["x"])) == pytest.approx(fresh, abs=0.02)
    # The Version that the devices serve is the base of the last Round.
    assert all(accuracy(serving.predict(x)) > 0.8 for serving in servings)
    restored = Serving(open_format(["onnx"]), Cache(tmp_path / "device-0"), (PUBLISHER.public,))
    np.testing.assert_array_equal(restored.predict(x), servings[0].predict(x))
    # The same Version with the ranges of the export.
    (folder / "ranges").unlink()
    assert fanin(*words, "--version", folder / "parameters").status == 0
    assert accuracy(np.load(tmp_path / "logits.npy")) < fresh - 0.3
    outcome = fanin("verify", "run", "--state", host.state)
    assert outcome.status == 0, outcome
