"""The calls of a strategy in its process: wrong results, refusals, the state, and when replies are read."""

import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from house.tree import ROOT
from support.strategies import MODULE, strategy_plan, write_strategies

from fanin.edge.tensors import TensorTable
from fanin.protos.errors import InvalidInput, InvalidPlan, Unavailable
from fanin.server.aggregation.rules import Reply, StrategyResult, StrategyTask, config_in
from fanin.server.strategies.calls import StrategyCalls, StrategyFailed
from fanin.server.strategies.process import StrategyProcess, StrategySettings, checked_strategies

TABLE: Final = TensorTable.of({"b": (2,), "w": (3,)})
BASE: Final = np.arange(5, dtype=np.float32)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the module, as in the process of a coordinator."""
    monkeypatch.chdir(write_strategies(tmp_path / "strategies"))
    (tmp_path / "strategies" / "imports.py").write_text("import a_package_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path / "strategies")
    monkeypatch.delitem(sys.modules, MODULE, raising=False)


def settings(name: str, **keys: object) -> StrategySettings:
    values = {"options": {}, "is_pure": False, "streams": False, "num_nodes": 3, "place": "/here"} | keys
    return StrategySettings(name=name if ":" in name else f"{MODULE}:{name}", **values)  # type: ignore[arg-type]


def calls(name: str, **keys: object) -> StrategyCalls:
    return StrategyCalls(settings(name, **keys))


def task(number: int = 1, state: bytes = b"", num_replies: int = 3) -> StrategyTask:
    return StrategyTask(
        round=number,
        config={"lr": 0.5, "sizes": (1, 2)},
        table=TABLE,
        parameters=BASE,
        state=state,
        num_replies=num_replies,
    )


def replies(log: list[str] | None = None) -> Iterator[Reply]:
    for number in range(3):
        if log is not None:
            log.append(f"reply {number}")
        yield Reply(parameters=BASE + np.float32(1 + number), metrics={"num-examples": 10 + number})


def run(strategy: StrategyCalls, number: int = 1, state: bytes = b"") -> StrategyResult:
    return strategy.run(task(number, state), BASE, replies())


FAILURES: Final = [
    ("ReturnsNone", "aggregate_train: returned no arrays (None), expected those of the next version"),
    ("ReturnsNothing", "aggregate_train: returned NoneType, expected an ArrayRecord and a MetricRecord"),
    ("NoRecord", "aggregate_train: returned list as the arrays, expected an ArrayRecord"),
    ("MoreArrays", "aggregate_train: returned 3 arrays, [] missing and ['tree'] new, expected the 2 of the version"),
    ("OtherShapes", "aggregate_train: returned the array 'b' as float32 (3,), expected floats (2,): a version has a"),
    ("Integers", "aggregate_train: returned the array 'b' as int64 (2,), expected floats (2,)"),
    ("NotFinite", "aggregate_train: returned NaN, infinity or values beyond float32 in the array 'b'"),
    ("TooLarge", "aggregate_train: returned NaN, infinity or values beyond float32 in the array 'b'"),
    ("Raises", "aggregate_train raised FileNotFoundError: no such file; correct the strategy"),
    ("Leaves", "aggregate_train raised SystemExit: enough; correct the strategy"),
    ("Indexes", "aggregate_train raised TypeError: 'generator' object is not subscriptable; correct the strategy"),
]


@pytest.mark.parametrize(("name", "text"), FAILURES)
def test_a_wrong_result_is_one_error(name: str, text: str) -> None:
    strategy = calls(name, streams=name == "Indexes")
    with pytest.raises(StrategyFailed) as excinfo:
        run(strategy)
    assert str(excinfo.value).startswith(f"strategy {MODULE}:{name}: {text}")
    assert "/etc/secret" not in str(excinfo.value)


REFUSALS: Final = [
    ("Missing", {}, "import raised AttributeError: module 'own_strategies' has no attribute 'Missing'"),
    ("nowhere:Own", {}, "import: no module 'nowhere' is installed or in /here, which modules are imported from; "),
    ("flwr.nowhere:Own", {}, "import: no module 'flwr.nowhere' is installed or in /here"),
    ("imports.py:Own", {}, "import raised ModuleNotFoundError: No module named 'a_package_that_is_missing'"),
    ("flwr.serverapp.strategy:fedavg", {}, "import: is no strategy of flwr, expected one such as FedAdam"),
    ("number", {}, "the constructor: got int, expected a flwr.serverapp.strategy.Strategy"),
    ("Own", {"options": {"stap": 1.0}}, "the constructor raised TypeError: "),
    ("OtherConfig", {}, "configure_train: its messages have proximal-mu = 0.5 in the config, but the plan configures"),
    ("OtherNumber", {}, "configure_train: its messages have server_round = 2 in the config, but the plan configures"),
    ("OtherArrays", {}, "configure_train: its messages have other arrays than those of the version"),
    ("Sends", {}, "configure_train: it sends messages itself, but in a Round of fanin the Plan selects the devices"),
    ("Skips", {}, "configure_train: returned no messages, expected one for each node: each Round trains"),
    ("clipping", {}, "configure_train: its messages have "),
    ("Bagging", {}, "its trees grow from Round to Round, and a version has a fixed layout of arrays"),
    ("FedMedian", {"streams": True}, "got flower.strategy_streams, but aggregate_train of flwr puts all"),
    ("FedAvg", {"options": {"min_train_nodes": 4}}, "configure_train: it waits for more than the 3 nodes"),
    ("Opaque", {"is_pure": True}, "got flower.strategy_is_pure, but its state cannot be saved: numbers is a"),
]


@pytest.mark.parametrize(("name", "keys", "text"), REFUSALS)
def test_a_strategy_that_cannot_run_is_refused_before_the_first_round(
    name: str, keys: dict[str, object], text: str
) -> None:
    with pytest.raises(StrategyFailed) as excinfo:
        calls(name, **keys).run(task(num_replies=0), BASE, iter(()))
    assert str(excinfo.value).startswith(f"strategy {settings(name).name}: {text}")


@pytest.mark.parametrize("streams", [False, True])
def test_replies_are_read_one_at_a_time_if_the_plan_declares_it(streams: bool) -> None:
    log: list[str] = []
    strategy = calls("Notes", streams=streams)
    importlib.import_module(MODULE).NOTES = log
    result = strategy.run(task(), BASE, replies(log))
    if streams:
        assert log == ["begin", "reply 0", "read", "reply 1", "read", "reply 2", "read"]
    else:
        assert log == ["reply 0", "reply 1", "reply 2", "begin", "read", "read", "read"]
    assert np.array_equal(result.parameters, BASE + 2)


@pytest.mark.parametrize("name", ["Own", "Portable", "Wrapped", "ready", "flwr.serverapp.strategy:FedAdam"])
def test_a_saved_state_gives_the_bits_of_the_object_itself(name: str) -> None:
    strategy = calls(name, options={"step": 0.5} if name == "Own" else {})
    first = run(strategy)
    second = run(strategy, 2, first.state)
    other = calls(name, options={"step": 0.5} if name == "Own" else {})
    again = run(other, 2, first.state)
    assert (second.state, second.unsaved, strategy.is_needed) == (again.state, "", False)
    assert np.array_equal(second.parameters, again.parameters)
    # Without the state, the second Round would have other values.
    assert not np.array_equal(run(other, 2).parameters, second.parameters)


def test_the_strategy_of_the_docs_resumes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "flower.md").read_text()
    (block,) = re.findall(r'^```python title="own_strategies.py"\n(.*?)^```', page, re.DOTALL | re.MULTILINE)
    (tmp_path / "strategies" / f"{MODULE}.py").write_text(block)
    strategy = calls("Halved", is_pure=True)
    first = run(strategy)
    second, again = run(strategy, 2, first.state), run(calls("Halved", is_pure=True), 2, first.state)
    assert np.allclose(first.parameters, BASE + 1, atol=0.1)
    assert np.array_equal(second.parameters, again.parameters)
    assert not np.array_equal(first.parameters, second.parameters)


def test_a_state_without_a_plain_form_stays_in_the_process_for_one_round() -> None:
    strategy = calls("Opaque")
    first = run(strategy)
    assert first.unsaved == "numbers is a builtins.range_iterator"
    assert strategy.is_needed
    second = run(strategy, 2, first.state)
    assert np.array_equal(second.parameters, BASE + 2 + 2)
    # The state of the Round before is gone: a repetition would begin in the middle of another.
    with pytest.raises(StrategyFailed, match=r"Opaque: the run cannot resume: its state after the last Round was not"):
        run(strategy, 2, first.state)


def test_a_state_of_another_format_is_one_error() -> None:
    with pytest.raises(StrategyFailed, match=r"__setstate__ raised ValueError: its saved state has another format"):
        run(calls("Own"), 2, b"rubbish")


def test_fedprox_runs_if_the_plan_configures_the_devices_alike() -> None:
    prox = "flwr.serverapp.strategy:FedProx"
    strategy = calls(prox, options={"proximal_mu": 0.5})
    with pytest.raises(StrategyFailed, match=r"configure_train: its messages have proximal-mu = 0.5 in the config"):
        run(strategy)
    alike = replace(task(), config={**task().config, "proximal-mu": 0.5})
    result = strategy.run(alike, BASE, replies())
    assert np.allclose(result.parameters, BASE + (10 * 1 + 11 * 2 + 12 * 3) / 33)


def test_a_strategy_may_name_the_number_of_the_round_as_the_devices_receive_it() -> None:
    assert np.array_equal(run(calls("Numbered"), 2).parameters, BASE + 2)


def test_a_plan_without_a_learning_rate_configures_none() -> None:
    plan = strategy_plan("Own", config={"depth": 3})
    assert config_in(plan, 1) == {"lr": plan.training.learning_rate, "depth": 3}
    assert config_in(replace(plan, training=replace(plan.training, learning_rate=0.0)), 1) == {"depth": 3}


def test_a_strategy_that_adds_noise_runs_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    strategy = calls("noisy")
    assert "noisy: its noise is not supported: a Mersenne Twister draws it" in caplog.text
    first = run(strategy)
    assert first.unsaved == ""
    assert (
        np.array_equal(run(calls("noisy"), 2, first.state).parameters, run(strategy, 2, first.state).parameters)
        is False
    )


def test_a_coordinator_that_stops_does_not_blame_the_strategy() -> None:
    process = StrategyProcess(settings("Blocks"), Path.cwd())
    timer = threading.Timer(2.0, process.close)
    timer.start()
    with pytest.raises(Unavailable, match="the coordinator is stopping"):
        process.run(task(), list(replies()))
    timer.join()
    with pytest.raises(Unavailable, match="the coordinator is stopping"):
        process.run(task(), list(replies()))


def test_a_process_that_ends_when_a_round_begins_is_replaced() -> None:
    process = StrategyProcess(settings("Own"), Path.cwd())
    process.run(task(num_replies=0), ())
    pid = process.pid
    assert pid is not None
    # It is still there when the task is sent, and does not read it any more.
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
    timer.start()
    assert np.array_equal(process.run(task(), replies()).parameters, BASE + 2)
    timer.join()
    assert process.pid != pid
    process.close()


def test_a_strategy_that_does_not_answer_is_killed() -> None:
    process = StrategyProcess(settings("Blocks"), Path.cwd(), answer_s=3.0)
    with pytest.raises(InvalidPlan, match=r"Blocks: no answer within 3 s, and its process was killed; find out where"):
        process.run(task(), list(replies()))
    assert process.pid is None
    process.close()


def test_a_coordinator_without_flwr_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "flwr.py").write_text("raise ModuleNotFoundError(\"No module named 'flwr'\", name='flwr')")
    process = StrategyProcess(settings("Own"), tmp_path)
    with pytest.raises(InvalidPlan, match=r"Own: No module named 'flwr'; pip install 'fanin\[flower\]'"):
        process.run(task(num_replies=0), ())
    process.close()


def test_a_wrong_name_on_the_command_line_is_one_error() -> None:
    with pytest.raises(InvalidInput, match=r"--strategy: got 'Own', expected the form package.module:name or path/to/"):
        checked_strategies(("a:b", "Own"))
