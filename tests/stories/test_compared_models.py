"""The accuracy of the global model and of the devices' own models, side by side, in a Run of ``fanin join``."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.hosted import Hosted
from support.models import PUBLISHER, export_bundle
from support.processes import start
from support.values import plan
from torch import nn

from fanin.clients.data.npz import open_npz
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.site.record import SiteCompared, read_record
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.storage.personal import local_values
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.export import App, Recipe, Sgd
from fanin.edge.runtimes.evaluations import METRIC_UNIT
from fanin.edge.tensors import Float32s
from fanin.protos.messages import MAX_COUNT, Statistic, Training, VersionPublished

NUM_DEVICES, NUM_ROUNDS, NUM_EXAMPLES, WAIT_S = 2, 6, 150, 120.0
NAMES = ("global.accuracy", "personal.accuracy", "personal.accuracy_int8", "global.loss", "personal.loss")
FEDPER = Training(epochs=8, learning_rate=0.3, seed=1)
DITTO = replace(FEDPER, personal_epochs=8, ditto_weight=0.01)
RECIPES: Mapping[str, tuple[dict[str, object], Training]] = {
    "fedper": ({"local": ["2.*"]}, FEDPER),
    "ditto": ({"proximal": True}, DITTO),
}


def bundle_of(recipe: dict[str, object]) -> Bundle:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    settings = Recipe(optimizer=Sgd(momentum=0.0), **recipe)  # type: ignore[arg-type]
    return export_bundle(
        App(
            name="compared",
            module=module,
            calibration=torch.randn(32, 6),
            batch_size=8,
            num_classes=2,
            recipe=settings,
        )
    )


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    host = Hosted(tmp_path).start()
    yield host
    host.stop()


def data_of(host: Hosted, device: int) -> Path:
    return host.folder / f"data-{device}.npz"


def write_examples(host: Hosted, device: int) -> None:
    """Write examples of a device. The same input has the other label on the other device."""
    x = np.random.default_rng(device).standard_normal((NUM_EXAMPLES, 6)).astype(np.float32)
    np.savez(data_of(host, device), x=x, y=((x[:, 0] > 0) ^ bool(device)).astype(np.int32))


def take_part(host: Hosted) -> None:
    """Run the processes of the devices for all Rounds."""
    (host.folder / "ca.pem").write_bytes(host.ca)
    (host.folder / "token").write_text(host.device_token)
    (host.folder / "publisher.pub").write_text(PUBLISHER.public)
    processes = []
    for device in range(NUM_DEVICES):
        write_examples(host, device)
        files = {
            "--ca": "ca.pem",
            "--token-file": "token",
            "--publisher": "publisher.pub",
            "--data": data_of(host, device),
        }
        words = [word for option, name in files.items() for word in (option, str(host.folder / name))]
        state = ["--state", str(host.folder / f"device-{device}"), "--runtime", "onnx", "--validation", "0.2"]
        command = ["-m", "fanin.commands.main", "join", "--server", host.address, *words, *state]
        processes.append(start([*command, "--max-updates", str(NUM_ROUNDS)], host.folder / f"device-{device}.log"))
    for running in processes:
        assert running.process.wait(WAIT_S) == 0, running.text()


def last_version(host: Hosted) -> VersionPublished:
    *_, event = host.published_versions()
    assert isinstance(event, VersionPublished) and event.round == NUM_ROUNDS
    return event


def plain_outcomes(
    host: Hosted, bundle: Bundle, device: int, values_of: Callable[[OpenedModel], Float32s]
) -> np.ndarray:
    """Return for each validation example whether a plain numpy program predicts its label, before the last Round."""
    with host.operator() as operator:
        parameters = operator.parameters(operator.version("run", NUM_ROUNDS - 1).version)
    own = local_values(Cache(host.folder / f"device-{device}").locals, bundle, "run", before=NUM_ROUNDS)
    assert own is not None
    values = values_of(OpenedModel(bundle=bundle, parameters=parameters, local=own))
    shared, local = bundle.manifest.split(values)
    views = dict(bundle.manifest.table.views(shared))
    if bundle.manifest.local is not None:
        views |= bundle.manifest.local.table.views(local)
    validation = open_npz(data_of(host, device), 0, 0.2).validation
    assert validation is not None
    hidden = np.tanh(validation.inputs["x"] @ views["0.weight"].T + views["0.bias"])
    logits = hidden @ views["2.weight"].T + views["2.bias"]
    return np.asarray(logits.argmax(1) == validation.y)


def global_values(model: OpenedModel) -> Float32s:
    """Return the parameters of the Version, with the initial values of personal parameters."""
    return model.bundle.completed(model.parameters)


@pytest.mark.parametrize("method", ["fedper", pytest.param("ditto", marks=pytest.mark.nightly)])
def test_an_operator_sees_both_models_where_labels_contradict_each_other(
    host: Hosted, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from fanin.commands.site.status import main as status

    recipe, training = RECIPES[method]
    bundle = bundle_of(recipe)
    statistics = tuple(Statistic(name=name, bound=MAX_COUNT) for name in NAMES)
    run_plan = plan(buffer=NUM_DEVICES, max_rounds=NUM_ROUNDS)
    host.start_run(replace(run_plan, training=training, statistics=statistics), bundle, PUBLISHER)
    take_part(host)
    event = last_version(host)
    # The sums are those of plain programs, to the last example.
    own = [plain_outcomes(host, bundle, device, OpenedModel.own_values) for device in range(NUM_DEVICES)]
    common = [plain_outcomes(host, bundle, device, global_values) for device in range(NUM_DEVICES)]
    assert event.statistics["personal.accuracy"] == sum(int(each.sum()) for each in own) * METRIC_UNIT
    assert event.statistics["global.accuracy"] == sum(int(each.sum()) for each in common) * METRIC_UNIT
    num = sum(len(each) for each in own)
    assert {event.statistics_examples[name] for name in NAMES} == {num}
    means = {name: event.statistics[name] / METRIC_UNIT / num for name in NAMES}
    assert means["personal.accuracy"] > 0.9 and means["personal.accuracy_int8"] > 0.85, means
    assert 0.3 < means["global.accuracy"] < 0.7, means
    assert means["personal.loss"] < 0.5 * means["global.loss"], means
    # Each device shows its own two numbers, and not those of the other.
    for device in range(NUM_DEVICES):
        folder = host.folder / f"device-{device}"
        record = read_record(folder)
        assert record is not None and isinstance(record.compared, SiteCompared)
        compared = record.compared
        assert (compared.run, compared.round, compared.version) == ("run", NUM_ROUNDS, NUM_ROUNDS - 1)
        assert compared.personal_model["accuracy"] == pytest.approx(own[device].mean(), abs=1e-4)
        assert compared.global_model["accuracy"] == pytest.approx(common[device].mean(), abs=1e-4)
        status(["--state", str(folder)])
        assert f"own model accuracy {own[device].mean():.4f}" in capsys.readouterr().out
    _check_watch(host, means, num, capsys)


def _check_watch(host: Hosted, means: Mapping[str, float], num: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the operator's command shows the means as text, and the sums as JSON."""
    from fanin.commands.main import main

    (host.folder / "operator").write_text(host.operator_token)
    words = ["watch", "run", "--server", host.address, "--ca", str(host.folder / "ca.pem")]
    words += ["--token-file", str(host.folder / "operator")]
    main(words)
    line = capsys.readouterr().out.splitlines()[-2]
    assert f"global {means['global.accuracy']:.4f} own {means['personal.accuracy']:.4f}" in line, line
    main([*words, "--verbose"])
    lines = capsys.readouterr().out
    assert f"personal.accuracy {means['personal.accuracy']:.4f}, personal.accuracy_int8" in lines, lines
    main([*words, "--json"])
    rows = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    statistics = [row["statistics"] for row in rows if row.get("statistics")]
    assert statistics[-1]["personal.accuracy"] / METRIC_UNIT == pytest.approx(means["personal.accuracy"] * num)
