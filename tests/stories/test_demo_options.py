"""``fanin demo``: wrong options are refused before anything starts, and its gate tolerates chance."""

import sys
from pathlib import Path

import pytest
from support.commands import Fanin, fanin_in_process, one_line, usage_line

from fanin.commands.demo.options import DATA_SETS
from fanin.commands.demo.tasks import TASKS
from fanin.datacenter.jobs.publish import check_int8
from fanin.edge.runtimes.quality import Quality
from fanin.protos.errors import InvalidVersion

MESHES = "expected each of pp, dp_replicate, dp_shard, tp at most once and as in pp=2, or 'none' alone"
TWO_LAYERS = "got 2 layers for 4 stages, expected at least one each"
NUMBERS = "2 layers, 0 heads, 0 kv heads, feed-forward 0, batch 16, accumulate 1, 4 microbatches, schedule 1F1B"


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """The command line."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rounds", "-1"), "--rounds, --delay-seed: got -1 and -1, expected at least 0 and -1"),
        (("--delay-seed", "-2"), "--rounds, --delay-seed: got 0 and -2, expected at least 0 and -1"),
        (("--devices", "0"), "--devices: got 0, expected at least one for each of the runtimes onnx"),
        (
            ("--devices", "2", "--runtimes", "onnx,litert,tflite"),
            "--devices: got 2, expected at least one for each of the runtimes onnx,litert,tflite",
        ),
        (("--dataset", "cats"), "--dataset: got 'cats', expected one of ['digits', 'fashion-mnist']"),
        (("--mesh", "pp=4,tp=2"), f"mesh pp=4,tp=2: {TWO_LAYERS} (world 8, {NUMBERS})"),
        (("--mesh", "two"), f"mesh: got 'two' in 'two', {MESHES}"),
        (("--codec", "int08"), "--codec: got 'int08', expected one of ['fixed32', 'int16', 'int4', 'int8']"),
        (("--runtimes", "onnx,abacus"), "--runtimes: got 'abacus', expected one of ['litert', 'onnx', 'tflite']"),
        (
            ("--runtimes", "onnx,litert", "--device-python", sys.executable),
            "--device-python: got 1, expected one for each of the runtimes ['onnx', 'litert']",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) and value[-1] != sys.executable else "",
)
def test_an_invalid_option_is_reported(fanin: Fanin, words: tuple[str, ...], message: str) -> None:
    assert usage_line(fanin("demo", *words), "demo") == message


def test_a_python_that_is_missing_is_reported(fanin: Fanin) -> None:
    assert one_line(fanin("demo", "--device-python", "/nowhere/python"), "demo") == (
        "--device-python: /nowhere/python cannot be run (No such file or directory); make devices builds the devices' "
        "environments"
    )


def test_the_help_has_the_names_of_all_tasks() -> None:
    assert tuple(TASKS) == DATA_SETS


def test_a_folder_that_is_not_empty_is_refused(fanin: Fanin, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("something")
    message = usage_line(fanin("demo", "--device-python", sys.executable, "--state", tmp_path), "demo")
    assert message == f"--state: {tmp_path} is not empty; name a new folder"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def quality(num: int, flips: int) -> Quality:
    """Return the quality for ``num`` examples, of which int8 misses ``flips`` that float classifies correctly."""
    return Quality(
        num_examples=num,
        loss_sum=1.0,
        num_predictions=num,
        num_correct_float=num,
        num_correct_int8=num - flips,
        num_agreeing=num - flips,
    )


@pytest.mark.parametrize(("num", "max_flips"), [(100, 4), (200, 6), (1000, 16)])
def test_the_second_training_is_published_only_if_int8_keeps_up(num: int, max_flips: int) -> None:
    for flips in (0, max_flips):
        check_int8(quality(num, flips))
    with pytest.raises(InvalidVersion, match="FN-0375"):
        check_int8(quality(num, max_flips + 1))
