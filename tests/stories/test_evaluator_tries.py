"""The evaluator of a coordinator: the tries of a Version whose process dies, and the order of Runs."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Final

import numpy as np
from support.errors import raises
from support.held_out import COMMAND, NUM_VALUES, Bench, evaluated_plan, write_data

from fanin.edge.tensors import Float32s
from fanin.protos.errors import Unavailable
from fanin.server.evaluation.evaluator import MAX_TRIES
from fanin.server.evaluation.jobs import EvaluationJob
from fanin.server.evaluation.process import EvaluatorProcess
from fanin.server.storage.contracts.values import BUNDLE

RECORDER: Final = """
import json, os, subprocess, sys

folder, num_deaths = sys.argv[1], int(sys.argv[2])
real = subprocess.Popen(sys.argv[3:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for line in sys.stdin.buffer:
    with open(folder + "/jobs", "a") as file:
        file.write(json.dumps([os.getpid(), line.decode()]) + "\\n")
    with open(folder + "/jobs") as file:
        if len(file.readlines()) <= num_deaths:
            os._exit(7)
    real.stdin.write(line)
    real.stdin.flush()
    sys.stdout.buffer.write(real.stdout.readline())
    sys.stdout.buffer.flush()
real.stdin.close()
"""
"""A process in front of the real one, which records its id and each job, and dies at a number of first jobs."""


def recorder(folder: Path, num_deaths: int) -> tuple[str, ...]:
    return (sys.executable, "-c", RECORDER, str(folder), str(num_deaths), *COMMAND)


def jobs_of(folder: Path) -> list[tuple[int, str, int]]:
    """Return the process id, the Run and the Version of each job."""
    rows = []
    for text in (folder / "jobs").read_text().splitlines():
        pid, line = json.loads(text)
        version = EvaluationJob.from_line(line.encode()).version
        assert version is not None, "the data sets were checked by another process"
        rows.append((pid, version.run_id, version.number))
    return rows


def versions(number: int) -> list[Float32s]:
    rng = np.random.default_rng(8)
    return [rng.normal(size=NUM_VALUES).astype(np.float32) for _ in range(number)]


async def reopened(folder: Path, data: Path, num_deaths: int) -> Bench:
    """Reopen a coordinator on its folder, with a process that records its jobs."""
    return await Bench(folder, data, command=recorder(folder, num_deaths)).open()


def test_a_version_whose_process_dies_is_tried_twice_and_again_after_a_restart(tmp_path: Path) -> None:
    data = write_data(tmp_path)

    async def main() -> None:
        bench = await Bench(tmp_path, data).open()
        await bench.begin(evaluated_plan())
        await bench.publish(versions(1)[0])
        await bench.close()
        # Version 1 uses up its tries, and the process dies once more at Version 0.
        bench = await reopened(tmp_path, data, MAX_TRIES + 1)
        bench.evaluator.start()
        page = await bench.page(2)
        assert [evaluation.version for evaluation in page] == [0, 1]
        assert (page[0].problem, set(page[0].values)) == ("", {"loss", "accuracy", "accuracy_int8", "int8_agreement"})
        assert page[1].problem == "evaluation: its process ended without a reply (status 7)"
        assert (page[1].values, page[1].data_sha256) == ({}, "")
        await bench.close()
        jobs = jobs_of(tmp_path)
        assert [number for _, _, number in jobs] == [1, 1, 0, 0]
        assert len({pid for pid, _, _ in jobs}) == 4
        bench = await reopened(tmp_path, data, 0)
        bench.evaluator.start()
        assert (await bench.page(1, from_version=1, good=True))[0].values
        await bench.close()
        assert [number for _, _, number in jobs_of(tmp_path)[4:]] == [1]

    assert MAX_TRIES == 2
    asyncio.run(main())


def test_the_problem_has_the_status_of_the_process(tmp_path: Path) -> None:
    async def main() -> None:
        process = EvaluatorProcess(("sh", "-c", "read line; exit 7"))
        job = EvaluationJob(blobs=tmp_path, data=tmp_path / "x.npz", bundle=BUNDLE, best="loss")
        # It is a matter of chance whether the end of the output or the end of the process is seen first.
        for _ in range(20):
            with raises(Unavailable, "evaluation: its process ended without a reply (status 7)"):
                await process.ask(job)
            assert process.pid is None

    asyncio.run(main())


def test_runs_alternate_and_the_newest_version_of_each_is_first(tmp_path: Path) -> None:
    data = write_data(tmp_path)

    async def main() -> None:
        bench = await Bench(tmp_path, data).open()
        for run_id in ("first", "second"):
            await bench.begin(evaluated_plan(), run_id)
            for flat in versions(2):
                await bench.publish(flat, run_id)
        await bench.close()
        bench = await reopened(tmp_path, data, 0)
        bench.evaluator.start()
        for run_id in ("first", "second"):
            assert [evaluation.problem for evaluation in await bench.page(3, run_id=run_id)] == [""] * 3
        await bench.close()

    asyncio.run(main())
    jobs = [(run_id, number) for _, run_id, number in jobs_of(tmp_path)]
    assert [number for _, number in jobs] == [2, 2, 1, 1, 0, 0]
    for number in range(3):
        assert {run_id for run_id, version in jobs if version == number} == {"first", "second"}
    # The Run that was evaluated longest ago is next.
    assert [run_id for run_id, _ in jobs[::2]] == [jobs[0][0]] * 3
    assert len({pid for pid, _, _ in jobs_of(tmp_path)}) == 1
