"""Errors of an absent Ray cluster, and of settings that no cluster supports."""

import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from support.commands import uncoded
from support.errors import raises

from fanin.commands.main import main
from fanin.protos.errors import InvalidInput, RuntimeMissing
from fanin.simulation.arguments import check_settings
from fanin.simulation.backends.ray_cluster import RayCluster, RayTasks
from fanin.simulation.settings import SimulationSettings


def test_ray_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises(RuntimeMissing, "simulate: got a Ray cluster, but ray is not installed here; pip install 'fanin[ray]'"):
        RayTasks(RayCluster())


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://localhost:{}"])
def test_an_unreachable_cluster_is_one_error_at_once(form: str) -> None:
    pytest.importorskip("ray")
    with socket.socket() as bound_socket:
        # The port is bound but not listening, so no process answers.
        bound_socket.bind(("127.0.0.1", 0))
        address = form.format(bound_socket.getsockname()[1])
        start_s = time.monotonic()
        with pytest.raises(InvalidInput) as excinfo:
            RayTasks(RayCluster(address=address))
    message = str(excinfo.value)
    assert message.startswith(f"ray: no cluster at {address} (")
    assert message.endswith("start one with `ray start --head`, or name another one")
    # Ray itself tries for minutes.
    assert time.monotonic() - start_s < 100.0


# It waits for ten seconds.
@pytest.mark.heavy
@pytest.mark.nightly
def test_a_process_that_is_no_cluster_is_one_error() -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        # Connections are accepted, and nothing answers. Ray itself waits for minutes.
        address = f"127.0.0.1:{server.getsockname()[1]}"
        error = (
            f"ray: got the address {address}, where a process listens that is not the head of a Ray cluster "
            "(no answer in 10 s); start one with `ray start --head`, or name another one"
        )
        with raises(InvalidInput, error):
            RayTasks(RayCluster(address=address))


def test_another_server_is_no_cluster() -> None:
    pytest.importorskip("ray")
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        with pytest.raises(InvalidInput, match="FN-1107"):
            RayTasks(RayCluster(address=address))
        server.stop(None)


NO_SHARE = (
    "ray: got cpus 0 and gpus 0, expected 0 or more, and not both 0: Ray would start all trainings at the same time"
)
TWO_BACKENDS = "simulate: got 2 processes and a Ray cluster, expected one of them; remove the other"
VMAP = (
    "simulate: got a Ray cluster with the engine 'vmap', expected 'graph': vmap trains the clients together in one "
    "process; set engine='graph'"
)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"cpus": 0.0}, NO_SHARE),
        ({"gpus": 1.5}, "ray: got gpus 1.5, expected a share below 1, or a whole number"),
    ],
)
def test_wrong_shares_are_refused(values: dict[str, float], error: str) -> None:
    with raises(InvalidInput, error):
        RayCluster(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (SimulationSettings(cluster=RayCluster(), processes=2), TWO_BACKENDS),
        (SimulationSettings(cluster=RayCluster(), engine="vmap"), VMAP),
    ],
)
def test_a_cluster_with_another_backend_is_refused(settings: SimulationSettings, error: str) -> None:
    with raises(InvalidInput, error):
        check_settings(settings)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--backend", "rey"), "--backend: got 'rey', expected one of processes, ray"),
        (
            ("--backend", "ray", "--client-gpus", "1.5"),
            "ray: got gpus 1.5, expected a share below 1, or a whole number",
        ),
        (("--ray-address", "head:6379"), "--ray-address, --client-cpus, --client-gpus: got them without --backend ray"),
    ],
)
def test_wrong_options_are_wrong_usage(
    options: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "app.py:app", *options]) == 2
    assert uncoded(capsys.readouterr().err) == f"fanin simulate: {error}; see fanin simulate --help\n"
