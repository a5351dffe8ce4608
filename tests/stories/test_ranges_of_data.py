"""A Run from an untrained module whose ranges the coordinator measures on its data set, in a process of its own."""

import csv
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.commands import Fanin, fanin_in_process
from support.fresh_digits import DATA, RUNTIMES, accuracy, digits_app, take_part
from support.models import PUBLISHER, export_bundle
from support.plain_files import in_litert, in_onnxruntime
from support.processes import Site
from support.values import plan

from fanin.clients.data.npz import write_npz
from fanin.edge.tensors import sha256_hex
from fanin.protos.plans import EvaluationPlan, Int8Plan, Training

pytestmark = pytest.mark.heavy
NUM_ROUNDS = 3
DIED = -9


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


def evaluations(site: Site, fanin: Fanin) -> list[Mapping[str, str]]:
    """Return the evaluations of the Versions of Rounds by the coordinator, oldest first."""
    table = site.folder / "evaluations.csv"
    for _ in range(600):
        outcome = fanin("evaluations", "run", "--state", site.state, "--csv", table)
        assert outcome.status == 0, outcome
        rows = list(csv.DictReader(table.read_text().splitlines()))
        if len(rows) > NUM_ROUNDS:
            return rows[1:]
    raise AssertionError(rows)


@pytest.mark.nightly
def test_each_version_is_right_in_int8_after_a_kill_and_verify_measures_again(tmp_path: Path, fanin: Fanin) -> None:
    held_out = tmp_path / "held-out.npz"
    write_npz(held_out, DATA.test)
    site = Site(tmp_path, data=(f"digits={held_out}",))
    try:
        dying = site.serve(kill_at="before:Publish:2")
        run_plan = replace(
            plan(buffer=len(RUNTIMES), max_rounds=NUM_ROUNDS),
            training=Training(epochs=3, learning_rate=0.04, seed=7),
            evaluation=EvaluationPlan(data="digits"),
            int8=Int8Plan(ranges="data"),
        )
        site.start_run(run_plan, export_bundle(digits_app(), ("onnx", "tflite")), PUBLISHER)
        with ThreadPoolExecutor(len(RUNTIMES)) as pool:
            parts = [pool.submit(take_part, site, tmp_path, device, NUM_ROUNDS) for device in range(len(RUNTIMES))]
            assert dying.wait(120.0) == DIED
            site.serve()
            for part in parts:
                part.result()
        rows = evaluations(site, fanin)
        files = {name: tmp_path / f"model.{name}" for name in ("onnx", "tflite")}
        options = [word for name, path in files.items() for word in (f"--{name}", path)]
        folder = tmp_path / "fetched"
        outcome = fanin("fetch", "run", "--state", site.state, "--out", folder, "--bundle", *options)
        assert outcome.status == 0, outcome
    finally:
        site.close()
    # Of each Version itself, from the first one on: no Round behind.
    assert [float(row["accuracy_int8"]) for row in rows] == pytest.approx(
        [float(row["accuracy"]) for row in rows], abs=0.02
    )
    fresh, x = float(rows[-1]["accuracy_int8"]), DATA.test.inputs["x"]
    assert fresh > 0.8
    assert accuracy(in_onnxruntime(files["onnx"].read_bytes(), x)) == pytest.approx(fresh)
    assert accuracy(in_litert(files["tflite"].read_bytes(), x)) == pytest.approx(fresh, abs=0.02)
    # The same Version with the ranges of the export.
    (folder / "ranges").unlink()
    words = ("infer", folder / "bundle", "--data", held_out, "--out", tmp_path / "logits.npy")
    assert fanin(*words, "--version", folder / "parameters").status == 0
    assert accuracy(np.load(tmp_path / "logits.npy")) < fresh - 0.3

    words = ("verify", "run", "--state", site.state)
    digest = sha256_hex(held_out.read_bytes())
    need = f"verified; ranges: not recomputed, needs data set digits with digest {digest}"
    outcome = fanin(*words)
    assert (outcome.status, outcome.out.count(need)) == (0, NUM_ROUNDS), outcome
    outcome = fanin(*words, "--data", f"digits={held_out}")
    assert (outcome.status, outcome.out.count("ranges: recomputed on digits with onnxruntime")) == (0, NUM_ROUNDS)
    assert outcome.out.count("equal bits") == NUM_ROUNDS, outcome
    other = tmp_path / "other.npz"
    write_npz(other, DATA.train)
    outcome = fanin(*words, "--data", f"digits={other}")
    assert outcome.status == 1
    assert outcome.out.count(f"{need}; --data has a file with digest") == NUM_ROUNDS, outcome
    assert "FN-1491" in outcome.err
