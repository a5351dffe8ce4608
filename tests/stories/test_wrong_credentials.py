"""Wrong credentials slow the address that sends them, and no valid caller behind it."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc import aio
from support import federations as f
from support.hosted import Hosted
from support.peers import Peer

from fanin.protos import calls
from fanin.protos import messages as m
from fanin.server.access.rates import MAX_SOURCES, WINDOW_S, WRONG_BURST, Sources, network_of, source_of
from fanin.simulation import run_virtual


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    host = Hosted(tmp_path, wrong_burst=WRONG_BURST).start()
    yield host
    host.stop()


async def guess(host: Hosted, num_calls: int) -> list[str]:
    """Make calls with wrong tokens, and return the codes of their errors."""
    credentials = grpc.ssl_channel_credentials(host.ca)
    codes: list[str] = []
    async with aio.secure_channel(f"127.0.0.1:{host.port}", credentials) as channel:
        list_runs = channel.unary_unary("/fanin.v1.Control/ListRuns")

        async def call(number: int) -> None:
            with pytest.raises(aio.AioRpcError) as error:
                await list_runs(b"", metadata=((calls.AUTHORIZATION, f"{calls.BEARER}wrong-{number}"),))
            codes.append(dict(error.value.trailing_metadata())[calls.CODE])

        for first in range(0, num_calls, 100):
            await asyncio.gather(*map(call, range(first, min(first + 100, num_calls))))
    return codes


@pytest.mark.parametrize("num_calls", [300, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_a_flood_of_wrong_tokens_is_slowed_and_a_device_at_the_same_address_works_at_once(
    host: Hosted, tmp_path: Path, num_calls: int
) -> None:
    bundle = f.bundle_in(tmp_path)
    host.start_run(f.plan(), bundle, f.PUBLISHER)
    began_s = time.monotonic()
    codes = asyncio.run(guess(host, num_calls))
    allowed = codes.count("FN-0670")
    assert WRONG_BURST <= allowed <= WRONG_BURST + time.monotonic() - began_s + 1
    assert codes.count("FN-1476") == num_calls - allowed

    began_s = time.monotonic()
    peer = Peer(host, bundle, 0, tmp_path / "device")
    with peer.transport() as transport, host.operator() as operator:
        transport.enroll(host.device_token)
        capabilities = m.Capabilities(codecs=("fixed32",), runtimes=("synthetic 1",), graph_formats=("onnx",))
        transport.check_in(m.CheckIn(protocol=m.PROTOCOL, capabilities=capabilities, wait_s=0.0))
        assert operator.run("run").state is m.RunState.RUNNING
    assert time.monotonic() - began_s < 2.0


def test_a_source_is_slowed_until_it_has_waited_and_one_line_a_minute_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = [1000.0]
    sources = Sources(lambda: now_s[0], lambda: 5.0)

    async def main() -> None:
        delays = [sources.count("192.0.2.7", "FN-0670") for _ in range(WRONG_BURST + 50)]
        assert delays[:WRONG_BURST] == [0.0] * WRONG_BURST
        assert min(delays[WRONG_BURST:]) > 0
        assert max(delays) <= 1.0
        assert sources.count("192.0.2.8", "FN-0670") == 0.0
        now_s[0] += 10.0
        assert [sources.count("192.0.2.7", "FN-1415") > 0 for _ in range(11)] == [False] * 9 + [True] * 2
        await asyncio.sleep(WINDOW_S + 1.0)

    with caplog.at_level("INFO", "fanin.server.access.sources"):
        run_virtual(main())
    first = sources.newest(1)[0]
    assert (first.source, first.num_calls, first.code, first.last_s) == ("192.0.2.7", WRONG_BURST + 61, "FN-1415", 5.0)
    assert caplog.messages == [
        f"192.0.2.7: {WRONG_BURST + 61} calls with wrong credentials within 60 s, the last with FN-1415",
        "192.0.2.8: 1 calls with wrong credentials within 60 s, the last with FN-0670",
    ]


def test_the_table_of_sources_is_bounded() -> None:
    async def main() -> None:
        sources = Sources(lambda: 0.0, lambda: 0.0)
        for number in range(MAX_SOURCES + 50):
            sources.count(f"source {number}", "FN-0670")
        newest = sources.newest(MAX_SOURCES + 50)
        assert len(newest) == MAX_SOURCES
        assert newest[0].source == f"source {MAX_SOURCES + 49}"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("peer", "source"),
    [
        ("ipv4:192.0.2.7:4711", "192.0.2.7"),
        ("ipv6:%5B2001:db8:1:2:3::9%5D:4711", "2001:db8:1:2::/64"),
        ("ipv6:[fe80::1%25eth0]:4711", "fe80::/64"),
        ("ipv6:%5B::ffff:192.0.2.7%5D:4711", "192.0.2.7"),
        ("unix:/run/fanin.sock", "unix"),
        ("ipv4:nonsense", "unknown"),
        ("", ""),
    ],
)
def test_a_peer_is_an_address_or_the_network_of_a_site(peer: str, source: str) -> None:
    assert source_of(peer) == source
    if peer.startswith("ipv4"):
        assert network_of(source) == source
