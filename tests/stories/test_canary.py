"""``fanin evaluate``: a Version on devices, over TLS, with a class that devices lack. No device trains."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support.commands import Fanin, fanin_in_process
from support.hosted import Hosted
from support.linear import BIAS, NUM_INPUTS, WEIGHT, linear_graphs
from support.values import PUBLISHER, plan

from fanin.clients.data.examples import Examples
from fanin.clients.data.stores import MemoryStore
from fanin.clients.device.embed import DeviceSettings, join
from fanin.clients.statistics import evaluation_plan, read_evaluation, start_evaluation
from fanin.edge.assembly.assemble import assemble
from fanin.protos.errors import InvalidPlan
from fanin.protos.messages import RunState

NUM_DEVICES = 3
LACKING = 2
"""The device without examples of class 2."""


@pytest.fixture
def fanin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fanin:
    """Subcommands in this process."""
    return fanin_in_process(capsys, monkeypatch)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    """A coordinator with a Run of one Round, and the publisher's key in a file."""
    host = Hosted(tmp_path).start()
    host.start_run(
        plan(buffer=NUM_DEVICES, max_rounds=1), assemble(linear_graphs(), tmp_path / "bundle", PUBLISHER), PUBLISHER
    )
    yield host
    host.stop()


def store_of(device: int) -> MemoryStore:
    """Return the examples of a device. One has no class 2, and no device has class 1 in its validation part."""
    rng = np.random.default_rng(device)
    x = rng.normal(size=(24, NUM_INPUTS)).astype(np.float32)
    y = np.array([0, 2] * 12 if device != LACKING else [0] * 24, np.int32)
    part = Examples(inputs={"x": x}, y=y)
    return MemoryStore(partition=device, train=part, validation=part.take(np.arange(8 + 4 * device)))


def joining(host: Hosted, folder: Path) -> ExitStack:
    """Join all devices."""
    stack = ExitStack()
    for device in range(NUM_DEVICES):
        settings = DeviceSettings(
            server=host.address,
            ca=host.ca,
            token=host.device_token,
            publisher=PUBLISHER.public,
            folder=folder / f"device-{device}",
            runtime="onnx",
        )
        stack.enter_context(join(settings, store_of(device)))
    return stack


def test_devices_measure_a_version_and_train_nothing(host: Hosted, fanin: Fanin, tmp_path: Path) -> None:
    (tmp_path / "publisher.key").write_text(PUBLISHER.private_bytes().hex())
    (tmp_path / "operator.token").write_text(host.operator_token)
    (tmp_path / "ca.pem").write_bytes(host.ca)
    with joining(host, tmp_path), host.operator() as operator:
        for _ in operator.watch("run"):
            pass
        before = operator.run("run")
        assert before.state is RunState.FINISHED and before.version == 1
        settings = evaluation_plan(NUM_DEVICES, ["recall_0", "recall_1", "recall_2"])
        start_evaluation(operator, "canary", ("run", 0), settings, PUBLISHER)
        shown = fanin(
            *("evaluate", "run", "--version", "0", "--devices", NUM_DEVICES, "--run-id", "canary"),
            *("--metric", "recall_0", "--metric", "recall_1", "--metric", "recall_2"),
            *("--server", host.address, "--ca", tmp_path / "ca.pem", "--token-file", tmp_path / "operator.token"),
            *("--key", tmp_path / "publisher.key", "--json"),
        )
        assert shown.status == 0, shown.err
        row = json.loads(shown.out)
        canary, version = operator.run("canary"), operator.version("canary").version
        assert operator.run("run") == before, "the training Run is as it was"
        assert version.parameters == operator.version("run", 0).version.parameters
        assert canary.state is RunState.FINISHED
    assert fanin("verify", "canary", "--state", host.state).status == 0
    parts = [store_of(device).validation for device in range(NUM_DEVICES)]
    validation = [part for part in parts if part is not None]
    predictions = [(part.inputs["x"] @ WEIGHT + BIAS).argmax(axis=1) for part in validation]
    sizes = np.array([len(part) for part in validation])
    assert (row["num_devices"], row["num_examples"]) == (NUM_DEVICES, sizes.sum())
    hits = sum(int((each == part.y).sum()) for each, part in zip(predictions, validation, strict=True))
    assert row["values"]["accuracy"] == pytest.approx(hits / sizes.sum())
    assert row["values"]["recall_1"] is None and row["examples"]["recall_1"] == 0
    for number, having in ((0, [0, 1, 2]), (2, [0, 1])):
        recalls = [float((predictions[i] == number)[validation[i].y == number].mean()) for i in having]
        expected = np.average(recalls, weights=sizes[having])
        assert row["values"][f"recall_{number}"] == pytest.approx(expected, abs=2e-5)
        assert row["examples"][f"recall_{number}"] == sizes[having].sum()


def test_under_masks_the_coordinator_has_the_sums_of_a_version(host: Hosted, tmp_path: Path) -> None:
    settings = evaluation_plan(NUM_DEVICES, ["recall_0"], ["round.protocol=secagg"])
    with joining(host, tmp_path), host.operator() as operator:
        start_evaluation(operator, "canary", ("run", 0), settings, PUBLISHER)
        result = read_evaluation(operator, "canary")
        assert operator.version("canary").version.parameters == operator.version("run", 0).version.parameters
    sizes = [len(part) for device in range(NUM_DEVICES) if (part := store_of(device).validation) is not None]
    assert (result.num_devices, result.num_examples, result.examples["recall_0"]) == (3, sum(sizes), sum(sizes))


def test_the_command_asks_joined_devices_and_prints_their_statistics(
    host: Hosted, fanin: Fanin, tmp_path: Path
) -> None:
    (tmp_path / "publisher.key").write_text(PUBLISHER.private_bytes().hex())
    (tmp_path / "operator.token").write_text(host.operator_token)
    (tmp_path / "ca.pem").write_bytes(host.ca)
    (tmp_path / "query.toml").write_text('min_devices = 2\n[[features]]\ninput = "y"\nclasses = 3\n')
    place = ("--server", host.address, "--ca", tmp_path / "ca.pem", "--token-file", tmp_path / "operator.token")
    asked = ("stats", tmp_path / "query.toml", "--devices", NUM_DEVICES, "--run-id", "labels", *place)
    with joining(host, tmp_path):
        shown = fanin(*asked, "--key", tmp_path / "publisher.key")
    assert shown.status == 0, shown.err
    stores = [store_of(device) for device in range(NUM_DEVICES)]
    labels = np.concatenate([part.y for store in stores for part in store.parts.values()])
    counts = np.bincount(labels, minlength=3).tolist()
    assert shown.out.splitlines()[1:] == [
        f"y 0: {len(labels)} values of 3 devices, mean {labels.mean():.10g}, standard deviation {labels.std():.10g}",
        "  out of range: 0 below, 0 above, 0 no numbers",
        f"  histogram from 0 to 2: {' '.join(map(str, counts))}",
    ]
    for words, code in (
        (asked[:2], "FN-1867"),
        (("stats",), "FN-1867"),
        (("stats", "--run-id", "run", *place), "FN-1866"),
    ):
        refused = fanin(*words)
        assert refused.status and f"[{code}]" in refused.err


@pytest.mark.parametrize(
    "override",
    [
        "aggregation.outer_optimizer=fedavgm",
        "stages=[{name='evaluate_only'}, {name='error_feedback'}]",
    ],
)
def test_a_plan_that_could_change_the_version_is_refused(host: Hosted, override: str) -> None:
    with host.operator() as operator, pytest.raises(InvalidPlan) as raised:
        start_evaluation(operator, "canary", ("run", 0), evaluation_plan(2, [], [override]), PUBLISHER)
    assert raised.value.code == "FN-1870"
