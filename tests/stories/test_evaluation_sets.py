"""Several data sets of a Run: each Version is evaluated on all of them, by the process of a coordinator."""

import asyncio
import hashlib
from pathlib import Path

import numpy as np
import pytest
from support.held_out import NUM_VALUES, Bench, evaluated_plan, write_data
from support.linear import NUM_CLASSES, NUM_INPUTS

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.npz import read_npz
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import VersionValues
from fanin.edge.tensors import Float32s, sha256_hex
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import VersionEvaluation
from fanin.protos.plans import EvaluationPlan, EvaluationSet, MetricSpec
from fanin.server.evaluation.metrics import evaluate_version

OTHER = (EvaluationSet(name="other", data="letters"),)


def write_other(folder: Path, num_inputs: int = NUM_INPUTS) -> Path:
    """Write a second data set of 7 examples, and return its path."""
    rng = np.random.default_rng(6)
    path = folder / "letters.npz"
    np.savez(
        path, x=rng.normal(size=(7, num_inputs)).astype(np.float32), y=rng.integers(0, NUM_CLASSES, 7).astype(np.int32)
    )
    return path


def versions(number: int) -> list[Float32s]:
    rng = np.random.default_rng(8)
    return [rng.normal(size=NUM_VALUES).astype(np.float32) for _ in range(number)]


def test_each_version_has_the_metrics_of_all_sets_and_the_best_one_is_that_of_a_set(tmp_path: Path) -> None:
    data, other = write_data(tmp_path), write_other(tmp_path)

    async def main() -> tuple[Bench, tuple[VersionEvaluation, ...], VersionEvaluation | None]:
        bench = await Bench(tmp_path, data, others={"letters": other}).open()
        await bench.begin(evaluated_plan(best="other.loss", sets=OTHER))
        for flat in versions(3):
            await bench.publish(flat)
        bench.evaluator.start()
        page = await bench.page(4)
        info = await bench.runs.info("run")
        await bench.close()
        return bench, page, info.best_evaluation

    bench, page, best = asyncio.run(main())
    runtime = open_runtime("onnx")
    for evaluation, flat in zip(page, (bench.bundle.initial_parameters(), *versions(3)), strict=True):
        expected = {}
        for prefix, path in {"": data, "other.": other}.items():
            batches = batches_in_order(read_npz(path), bench.bundle.manifest.batch_size)
            values = evaluate_version(runtime, bench.bundle, VersionValues(parameters=flat), batches).values
            expected |= {prefix + name: value for name, value in values.items()}
        assert evaluation.values == expected
        assert evaluation.num_examples == 30
        digests = sha256_hex(data.read_bytes()) + sha256_hex(other.read_bytes())
        assert evaluation.data_sha256 == hashlib.sha256(digests.encode()).hexdigest()
    assert best == min(page, key=lambda evaluation: evaluation.values["other.loss"])
    assert best != min(page, key=lambda evaluation: evaluation.values["loss"])


def refusal_code(folder: Path, others: dict[str, Path], **keys: object) -> tuple[str, str]:
    """Return the code and the text with which a Run does not start."""

    folder.mkdir(exist_ok=True)

    async def main() -> tuple[str, str]:
        bench = await Bench(folder, write_data(folder), others=others).open()
        with pytest.raises(InvalidPlan) as refused:
            await bench.begin(evaluated_plan(**keys))
        await bench.close()
        return refused.value.code, str(refused.value)

    return asyncio.run(main())


def test_a_run_with_a_set_that_cannot_be_evaluated_does_not_start(tmp_path: Path) -> None:
    code, text = refusal_code(tmp_path, {}, sets=OTHER)
    assert code == "FN-0250" and "evaluation.sets: got 'letters', expected one of ['digits']" in text
    code, text = refusal_code(tmp_path / "1", {"letters": tmp_path / "absent.npz"}, sets=OTHER)
    assert code == "FN-0661" and "evaluation.sets: other: absent.npz: no such file" in text
    assert str(tmp_path) not in text
    code, text = refusal_code(tmp_path / "2", {"letters": write_other(tmp_path, NUM_INPUTS + 1)}, sets=OTHER)
    assert code == "FN-0661" and "evaluation.sets: other: x: got float32 (7, 7), expected float32 (" in text
    code, text = refusal_code(tmp_path / "3", {"letters": write_other(tmp_path)}, sets=OTHER, best="another.loss")
    assert code == "FN-0661" and "evaluation.best: got 'another.loss', expected one of" in text


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"data": "digits", "sets": OTHER * 2}, "FN-0220"),
        ({"sets": OTHER}, "FN-1845"),
        ({"data": "digits", "sets": OTHER, "metrics": (MetricSpec(name="other.loss"),)}, "FN-1845"),
    ],
)
def test_sets_that_do_not_fit_the_plan_are_refused(keys: dict[str, object], code: str) -> None:
    with pytest.raises(InvalidPlan) as refused:
        EvaluationPlan(**keys)  # type: ignore[arg-type]  # the values of each key
    assert refused.value.code == code


def test_the_name_of_a_set_has_no_dot() -> None:
    with pytest.raises(InvalidPlan, match=r"evaluation\.sets\.0\.name: got 'a\.b'"):
        EvaluationPlan(data="digits", sets=(EvaluationSet(name="a.b", data="letters"),))
