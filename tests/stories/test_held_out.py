"""Evaluation of Versions on held-out data, in the real process with the real runtime."""

import asyncio
import csv
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from house.tree import ROOT
from support import federations as f
from support.boards import values_in
from support.commands import Fanin, fanin_in_process, usage_line
from support.held_out import LOOK_S, NAME, NUM_VALUES, WAIT_S, Bench, evaluated_plan, linear_bundle, write_data
from support.hosted import Hosted
from support.linear import NUM_INPUTS
from support.metric_graphs import write_graph
from support.outside import file_block, install, install_module, python_blocks, run
from support.peers import Peer
from support.processes import Site
from support.virtual import plan, start

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.npz import read_npz
from fanin.edge.metrics.metric import metrics_of
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import VersionValues
from fanin.edge.tensors import Float32s, sha256_hex
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import VersionEvaluation, VersionPublished
from fanin.protos.plans import CohortPlan, EvaluationPlan, MetricSpec, Plan
from fanin.server.evaluation.evaluator import SETTLE_S
from fanin.server.evaluation.metrics import evaluate_version

PAGE = (ROOT / "docs" / "howto" / "evaluate.md").read_text()


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


def versions(number: int) -> list[Float32s]:
    rng = np.random.default_rng(8)
    return [rng.normal(size=NUM_VALUES).astype(np.float32) for _ in range(number)]


def test_each_due_version_has_the_metrics_of_its_parameters(tmp_path: Path) -> None:
    names = ["macro_f1", "nll", "auc", "ece", "top2_accuracy"]
    metrics = tuple(MetricSpec(name=name) for name in names)

    async def main() -> tuple[Bench, tuple[VersionEvaluation, ...], VersionEvaluation | None]:
        bench = await Bench(tmp_path, write_data(tmp_path)).open()
        await bench.begin(evaluated_plan(every=2, best="macro_f1", metrics=metrics))
        for flat in versions(5):
            await bench.publish(flat)
        bench.evaluator.start()
        page = await bench.page(3)
        info = await bench.runs.info("run")
        assert info.newest_evaluation == page[-1]
        await bench.close()
        return bench, page, info.best_evaluation

    bench, page, best = asyncio.run(main())
    assert [evaluation.version for evaluation in page] == [0, 2, 4]
    batches = tuple(batches_in_order(read_npz(bench.data), bench.bundle.manifest.batch_size))
    runtime = open_runtime("onnx")
    for evaluation, flat in zip(page, (bench.bundle.initial_parameters(), versions(5)[1], versions(5)[3]), strict=True):
        expected = evaluate_version(runtime, bench.bundle, VersionValues(parameters=flat), batches, metrics_of(names))
        assert (evaluation.values, evaluation.num_examples) == (expected.values, 30)
        # The loss of the linear model is the cross entropy, and its int8 model the float one.
        assert evaluation.values["nll"] == pytest.approx(evaluation.values["loss"], rel=1e-5)
        assert evaluation.values["nll"] == pytest.approx(evaluation.values["nll_int8"], rel=1e-5)
        assert {*names} | {f"{name}_int8" for name in names} <= evaluation.values.keys()
        assert (evaluation.data, evaluation.data_sha256) == (NAME, sha256_hex(bench.data.read_bytes()))
        assert (evaluation.runtime, evaluation.problem) == (runtime.name, "")
    assert len({evaluation.values["loss"] for evaluation in page}) == 3
    assert best == max(page, key=lambda evaluation: evaluation.values["macro_f1"])


def test_a_killed_process_is_replaced_and_a_missing_file_is_named_without_its_folder(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path, write_data(tmp_path)).open()
        first, second = versions(2)
        await bench.begin(evaluated_plan())
        bench.evaluator.start()
        await bench.page(1)
        await bench.publish_during_a_stop(first)
        bench.signal(signal.SIGKILL)
        assert (await bench.page(2))[1].problem == ""
        bench.data.unlink()
        await bench.publish(second)
        problem = (await bench.page(3))[2].problem
        assert (
            problem == "held-out.npz: no such file; expected an .npz file with y and an array for each input, such as x"
        )
        best = (await bench.runs.info("run")).best_evaluation
        assert best is not None
        assert best.version < 2
        await bench.close()

    asyncio.run(main())


@pytest.mark.nightly
def test_a_hung_process_is_ended_and_a_restart_evaluates_the_remaining_versions(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path, write_data(tmp_path), timeout_s=10.0).open()
        first, second, third = versions(3)
        await bench.begin(evaluated_plan())
        bench.evaluator.start()
        await bench.page(1)
        pid = bench.process.pid
        await bench.publish_during_a_stop(first)
        assert (await bench.page(2))[1].problem == ""
        assert bench.process.pid != pid
        # The coordinator stops in the middle of a job, and the next one repeats it.
        await bench.publish_during_a_stop(second)
        await bench.close()
        content, bundle = bench.data.read_bytes(), bench.bundle
        bench = await Bench(tmp_path, bench.data).open()
        bench.bundle = bundle
        assert len(await bench.runs.evaluations("run", 0)) == 2
        bench.evaluator.start()
        assert (await bench.page(3))[2].problem == ""
        # A Version with missing data is tried again after a restart.
        bench.data.unlink()
        await bench.publish(third)
        assert (await bench.page(4))[3].problem
        await bench.close()
        bench.data.write_bytes(content)
        bench = await Bench(tmp_path, bench.data).open()
        bench.evaluator.start()
        await bench.page(1, from_version=3, good=True)
        await bench.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"data": "letters"}, "evaluation.data: got 'letters', expected one of ['digits']; its operator registers"),
        (
            {"metrics": (MetricSpec(name="rarest_recall"),)},
            "got 'rarest_recall', expected one of ['absolute_error', 'auc', 'balanced_accuracy', 'ece', 'macro_f1', ",
        ),
        ({"best": "recall"}, "evaluation.best: got 'recall', expected one of ['accuracy', 'accuracy_int8', "),
    ],
)
def test_a_run_with_an_unknown_name_does_not_start(tmp_path: Path, keys: dict[str, object], error: str) -> None:
    assert error in refusal(tmp_path, evaluated_plan(**keys), write_data(tmp_path))


def test_a_run_with_data_that_does_not_fit_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    np.savez(path, x=np.zeros((4, NUM_INPUTS + 1), np.float32), y=np.zeros(4, np.int32))
    error = refusal(tmp_path, evaluated_plan(), path)
    assert error.startswith("run run: evaluation on 'digits': x: got float32 (4, 7), expected float32 (")


GRAPH_METRIC = """
from pathlib import Path

from fanin.edge.metrics.graphs import graph_metric

right = graph_metric(Path(__file__).with_name("right.onnx"))
"""


@pytest.fixture(scope="module")
def metric_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two distributions: that of the page's metric, and one of a metric that is a graph."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, PAGE, "fanin.metrics")
    write_graph(folder / "right.onnx")
    install_module(folder, ("right", "graph_metrics:right"), GRAPH_METRIC, "fanin.metrics")
    return folder


def test_the_metric_of_the_page_is_short_and_keeps_the_contract(metric_folder: Path, tmp_path: Path) -> None:
    example, check = file_block(PAGE, "rare_metrics.py"), python_blocks(PAGE)[-1]
    assert len(example.splitlines()) < 40
    completed = run(metric_folder, check, cwd=tmp_path)
    assert (completed.returncode, completed.stderr) == (0, "")


def test_an_installed_metric_chooses_the_best_version_and_a_graph_is_one(
    metric_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(metric_folder))

    async def main() -> None:
        bench = await Bench(tmp_path, write_data(tmp_path)).open()
        metrics = (MetricSpec(name="rarest_recall"), MetricSpec(name="right"))
        await bench.begin(evaluated_plan(best="rarest_recall", metrics=metrics))
        await bench.publish(versions(1)[0])
        bench.evaluator.start()
        page = await bench.page(2)
        info = await bench.runs.info("run")
        # The best Version has the larger recall, or is the older of two with equal recall.
        assert info.best_evaluation == max(page, key=lambda evaluation: evaluation.values["rarest_recall"])
        assert 0.0 <= page[0].values["rarest_recall_int8"] <= 1.0
        # The graph computes the accuracy.
        for evaluation in page:
            for suffix in ("", "_int8"):
                assert evaluation.values[f"right{suffix}"] == pytest.approx(evaluation.values[f"accuracy{suffix}"])
        await bench.close()

    asyncio.run(main())


def test_another_run_starts_while_a_data_set_is_checked(tmp_path: Path) -> None:
    async def main() -> None:
        before = set(children_of(os.getpid()))
        # This process never replies.
        bench = await Bench(tmp_path, write_data(tmp_path), command=("sleep", "60")).open()
        task = asyncio.create_task(bench.begin(evaluated_plan()))
        for _ in range(int(WAIT_S / LOOK_S)):
            if set(children_of(os.getpid())) - before:
                break
            await asyncio.sleep(LOOK_S)
        async with asyncio.timeout(WAIT_S):
            await start(bench.runs, linear_bundle(tmp_path / "other"), plan(), "other")
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not set(children_of(os.getpid())) - before
        await bench.close()

    asyncio.run(main())


def test_a_run_does_not_start_without_a_runtime_for_its_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("onnxruntime", "ai_edge_litert", "tflite_runtime"):
        (tmp_path / f"{library}.py").write_text(f"raise ModuleNotFoundError('none', name={library!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    error = refusal(tmp_path, evaluated_plan(), write_data(tmp_path))
    assert error.startswith("run run: evaluation on 'digits': runtime: none that runs graphs in ['onnx'] is installed")
    assert error.endswith("pip install 'fanin[onnx]'")


def test_a_coordinator_without_the_data_set_serves_the_run_and_names_the_missing_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path, write_data(tmp_path)).open()
        await bench.begin(evaluated_plan())
        await bench.close()
        bundle = bench.bundle
        bench = await Bench(tmp_path, bench.data, name="letters").open()
        bench.bundle = bundle
        bench.evaluator.start()
        await bench.publish(versions(1)[0])
        await asyncio.sleep(2 * SETTLE_S)
        info = await bench.runs.info("run")
        assert (info.version, info.newest_evaluation, bench.process.pid) == (1, None, None)
        await bench.close()

    asyncio.run(main())
    (warning,) = (record.message for record in caplog.records if "not evaluated" in record.message)
    assert "got no data set 'digits', expected --data digits=PATH; known are ['letters']" in warning


def refusal(folder: Path, run_plan: Plan, data: Path) -> str:
    async def main() -> str:
        bench = await Bench(folder, data).open()
        with pytest.raises(InvalidPlan) as excinfo:
            await bench.begin(run_plan)
        assert (await bench.runs.listed()).runs == ()
        await bench.close()
        return str(excinfo.value)

    return asyncio.run(main())


def story_plan(data: str) -> Plan:
    plan = f.plan(num_rounds=2)
    return replace(
        plan,
        cohort=CohortPlan(concurrency=1, buffer=1, quorum=1, deadline_s=300.0),
        evaluation=EvaluationPlan(data=data),
    )


def children_of(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_rounds_do_not_wait_for_an_evaluation_and_a_killed_coordinator_repeats_it(tmp_path: Path, fanin: Fanin) -> None:
    expected = digests_without_evaluation(tmp_path)
    site = Site(tmp_path, data=(f"{NAME}={write_data(tmp_path)}",))
    try:
        coordinator = site.serve()
        bundle = linear_bundle(tmp_path)
        site.start_run(story_plan(NAME), bundle, f.PUBLISHER)
        await_evaluations(site, 1)
        (evaluator,) = children_of(coordinator.process.pid)
        assert os.getpriority(os.PRIO_PROCESS, evaluator) == 19
        assert Path(f"/proc/{evaluator}/oom_score_adj").read_text() == "1000\n"
        os.kill(evaluator, signal.SIGSTOP)
        Peer(site, bundle, 0, tmp_path / "device").take_part(2)
        events = [entry.event for entry in site.events()]
        assert [entry.version_sha256 for entry in events if isinstance(entry, VersionPublished)] == expected
        # The evaluator's process ends with the coordinator, also in the middle of a job.
        coordinator.kill()
        os.kill(evaluator, signal.SIGCONT)
        await_end(evaluator)
        site.serve()
        with site.operator() as operator:
            assert [entry.version for entry in await_evaluations(site, 3)] == [0, 1, 2]
            best = operator.run("run").best_evaluation
            evaluations = list(operator.evaluations("run"))
            assert best == min(evaluations, key=lambda entry: entry.values["loss"])
        check_commands(fanin, site, evaluations)
    finally:
        site.close()


def check_commands(fanin: Fanin, site: Site, evaluations: list[VersionEvaluation]) -> None:
    """Check that the commands of operators show the metrics, and that the best Version is written."""
    best, newest = min(evaluations, key=lambda evaluation: evaluation.values["loss"]), evaluations[-1]
    description = fanin("describe", "run", "--state", site.state).out
    values = ", ".join(f"{name} {newest.values[name]:.4f}" for name in sorted(newest.values))
    assert f"  held out  version 2 on digits (30 examples): {values}\n" in description
    assert f"  best      version {best.version}: loss {best.values['loss']:.4f}\n" in description
    assert "            evaluation: data digits\n" in description
    (row,) = json.loads(fanin("runs", "--state", site.state, "--json").out)["runs"]
    assert row["best_evaluation"]["values"] == dict(best.values)
    file, board = site.folder / "metrics.csv", site.folder / "board"
    outcome = fanin("evaluations", "run", "--state", site.state, "--csv", file, "--tensorboard", board)
    assert outcome.status == 0, outcome
    assert len(outcome.out.splitlines()) == 3
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(int(row["version"]), float(row["accuracy_int8"])) for row in rows] == [
        (evaluation.version, evaluation.values["accuracy_int8"]) for evaluation in evaluations
    ]
    assert values_in(board) == pytest.approx(
        {(f"held_out/{name}", each.version): value for each in evaluations for name, value in each.values.items()}
    )
    out = site.folder / "best.npz"
    outcome = fanin("fetch", "run", "--state", site.state, "--out", out, "--best", "--json")
    assert json.loads(outcome.out)["version"] == best.version
    assert out.exists()
    outcome = fanin("fetch", "run", "--state", site.state, "--out", out, "--best", "--version", 1)
    assert usage_line(outcome, "fetch") == "--best: got --version 1 too, expected one of them"


def digests_without_evaluation(folder: Path) -> list[str]:
    host = Hosted(folder / "plain").start()
    try:
        bundle = linear_bundle(folder / "plain")
        host.start_run(story_plan(""), bundle, f.PUBLISHER)
        Peer(host, bundle, 0, folder / "plain" / "device").take_part(2)
        digests = [event.version_sha256 for event in host.published_versions()]
    finally:
        host.stop()
    assert len(digests) == 2
    return digests


def await_evaluations(site: Site, num: int) -> list[VersionEvaluation]:
    deadline = time.monotonic() + WAIT_S
    with site.operator() as operator:
        while len(evaluations := list(operator.evaluations("run"))) < num:
            assert time.monotonic() < deadline, evaluations
            time.sleep(0.05)
    return evaluations


def await_end(pid: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while Path(f"/proc/{pid}/exe").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the evaluator outlived its coordinator"
        time.sleep(0.05)
