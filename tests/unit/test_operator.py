"""The operator's client: it refuses a wrong argument by name before it sends a request."""

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest
from support.values import PUBLISHER, version

from fanin.clients import Operator
from fanin.clients.transport import Connection
from fanin.protos.calls import AUTHORIZATION
from fanin.protos.errors import Conflict, InvalidInput
from fanin.server.access.authority import local_identity


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The certificate of a local authority."""
    return local_identity(tmp_path_factory.mktemp("tls"), ("localhost",), datetime.now(UTC)).ca_certificate


@pytest.fixture
def connection(ca: bytes) -> Iterator[Connection]:
    """A connection to a port without a listener: every call that is sent raises Unavailable."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        with closing(Connection(f"127.0.0.1:{sock.getsockname()[1]}", ca)) as connection:
            yield connection


WRONG: list[tuple[Callable[[Any], object], str]] = [
    (lambda operator: operator.check_plan("plan.toml"), "check_plan: plan: got str, expected Plan"),
    (lambda operator: operator.publish_bundle("bundle"), "publish_bundle: bundle: got str, expected Bundle"),
    (lambda operator: operator.start_run(7, None, None, None), "start_run: run_id: got int, expected str"),
    (lambda operator: operator.start_run("run", "plan.toml", None, None), "start_run: plan: got str, expected Plan"),
    (lambda operator: operator.publish_version(1, b"", 1), "publish_version: version: got int, expected Version"),
    (
        lambda operator: operator.publish_version(version(), "", 1),
        "publish_version: data: got str, expected bytes",
    ),
    (
        lambda operator: operator.publish_version(version(), b"", -1),
        "publish_version: num_rounds: got -1, expected 0 to 4294967295",
    ),
    (lambda operator: operator.reclaim(7, PUBLISHER), "reclaim: run_id: got int, expected str"),
    (lambda operator: operator.reclaim("run", "key"), "reclaim: publisher: got str, expected SigningKey"),
    (lambda operator: operator.reclaim("run", PUBLISHER, "1"), "reclaim: number: got str, expected int"),
    (
        lambda operator: operator.reclaim("run", PUBLISHER, 1, -1),
        "reclaim: num_rounds: got -1, expected 0 to 4294967295",
    ),
    (lambda operator: operator.command("stop"), "command: command: got str, expected Command"),
    (lambda operator: operator.prune("run"), "prune: request: got str, expected Prune"),
    (lambda operator: operator.run(None), "run: run_id: got NoneType, expected str"),
    (lambda operator: operator.run("\ud800"), "run: run_id: got a str with a lone surrogate at 0, expected text"),
    (lambda operator: operator.describe(b"run"), "describe: run_id: got bytes, expected str"),
    (lambda operator: operator.describe("run", "10"), "describe: num_rounds: got str, expected int"),
    (
        lambda operator: operator.describe("run", 1 << 32),
        f"describe: num_rounds: got {1 << 32}, expected 0 to 4294967295",
    ),
    (lambda operator: operator.accepted_devices(7, 1), "accepted_devices: run_id: got int, expected str"),
    (lambda operator: operator.accepted_devices("run", 1.0), "accepted_devices: round_number: got float, expected int"),
    (lambda operator: operator.version(7), "version: run_id: got int, expected str"),
    (lambda operator: operator.version("run", True), "version: number: got bool, expected int"),
    (lambda operator: operator.version("run", -1), f"version: number: got -1, expected 0 to {(1 << 63) - 1}"),
    (lambda operator: operator.evaluations(7), "evaluations: run_id: got int, expected str"),
    (lambda operator: operator.parameters(None), "parameters: version: got NoneType, expected Version"),
    (lambda operator: operator.parameter_bytes(3), "parameters: version: got int, expected Version"),
    (lambda operator: operator.watch(7), "watch: run_id: got int, expected str"),
    (lambda operator: operator.watch_live(7), "watch_live: run_id: got int, expected str"),
    (lambda operator: operator.watch("run", "0"), "watch: from_sequence: got str, expected int"),
    (lambda operator: operator.chunk(b"sha256"), "chunk: sha256: got bytes, expected str"),
]


@pytest.mark.parametrize(("call", "text"), WRONG, ids=[text for _, text in WRONG])
def test_a_wrong_argument_is_refused_by_name(connection: Connection, call: Callable[[Any], object], text: str) -> None:
    with pytest.raises(InvalidInput) as excinfo:
        call(Operator(connection, "token"))
    assert str(excinfo.value) == text


def test_every_method_has_a_row() -> None:
    methods = {name for name in vars(Operator) if not name.startswith("_")} - {"connect", "runs"}
    assert methods == {text.partition(":")[0] for _, text in WRONG} | {"parameter_bytes"}


NO_TOKEN = "characters that are no token, expected one line of printable ones"


@pytest.mark.parametrize(
    ("token", "text"),
    [
        (None, "got NoneType, expected str"),
        (b"token", "got bytes, expected str"),
        ("", f"got 0 {NO_TOKEN}"),
        (" \n", f"got 0 {NO_TOKEN}"),
        ("a\nb", f"got 3 {NO_TOKEN}"),
        ("\u00e9", f"got 1 {NO_TOKEN}"),
    ],
)
def test_a_token_that_is_none_is_refused(connection: Connection, token: Any, text: str) -> None:
    with pytest.raises(InvalidInput) as excinfo:
        Operator(connection, token)
    assert str(excinfo.value) == f"operator: token: {text}"


def test_white_space_around_a_token_is_removed(connection: Connection) -> None:
    for token in ("abc", "abc\n", " abc\r\n"):
        assert dict(Operator(connection, token)._call.metadata)[AUTHORIZATION] == "Bearer abc"


@pytest.mark.parametrize(
    ("address", "certificate", "text"),
    [
        (7, b"", "connect: address: got int, expected str"),
        ("127.0.0.1:1", "-----BEGIN", "connect: ca_certificate: got str, expected bytes"),
    ],
)
def test_a_connection_to_a_wrong_argument_is_refused(address: Any, certificate: Any, text: str) -> None:
    with pytest.raises(InvalidInput) as excinfo, Operator.connect(address, certificate, "token"):
        pass
    assert str(excinfo.value) == text


def test_a_client_without_a_connection_is_refused() -> None:
    operator: Any = Operator
    with pytest.raises(InvalidInput, match="FN-0801"):
        operator("127.0.0.1:7443", "token")


def test_a_call_after_the_connection_was_closed_is_not_repeated(ca: bytes) -> None:
    with Operator.connect("127.0.0.1:1", ca, "token") as operator:
        pass
    for call in (operator.runs, lambda: list(operator.watch("run")), lambda: operator.chunk("0" * 64)):
        with pytest.raises(Conflict, match="FN-0818"):
            call()
