"""Round protocols of external packages: that of the docs page, one with messages after the close, one with masks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from house.tree import ROOT

from fanin.clients.device.session.known import known_protocols
from support.outside import file_block, install_code

PAGE = ROOT / "docs" / "howto" / "round-protocols.md"
ENTRIES = "[fanin.round_protocols]\n{name} = {name}:coordinator\n[fanin.device_protocols]\n{name} = {name}:device\n"
WITNESSED = '''
"""The devices of the closed set confirm its digest before it is folded. One is added to its sum for each of them."""

from dataclasses import replace
from hashlib import sha256


def coordinator(plan):
    import numpy as np

    from fanin.edge.rings import Ring
    from fanin.server.protocols.exchanging import exchanging
    from fanin.server.protocols.phases import Phase, PhaseExchange

    def names(facts, device):
        return "".join(sorted(facts.rosters["training"])).encode()

    def check(facts, device, payload):
        if payload != sha256(names(facts, device)).digest():
            raise ValueError("got the digest of another set")

    def confirmed(facts, device):
        return len(facts.rosters["witnessing"]).to_bytes(2, "little")

    joining = Phase(
        name="joining",
        gives_places=True,
        assigns=True,
        exchange=PhaseExchange(respond=lambda facts, device: b"joined", max_bytes=1),
    )
    closed_set = PhaseExchange(respond=names, max_bytes=0)
    training = Phase(name="training", assigns=True, accepts_updates=True, exchange=closed_set)
    witnessing = Phase(
        name="witnessing", assigns=True, exchange=PhaseExchange(respond=confirmed, check=check, max_bytes=32, quorum=3)
    )
    def correct(facts):
        number = len(facts.rosters["witnessing"])
        return lambda first, last: np.full(last - first, number, np.int64)

    protocol = exchanging("witnessed", before=(joining,), after=(witnessing,), training=training)
    return replace(protocol, correct=correct, ring=Ring(bits=56))


def device():
    from fanin.clients.device.session.protocols import DeviceProtocol, DeviceStep, Message

    def witness(context):
        return Message(payload=sha256(context.kept["training"].answer).digest())

    return DeviceProtocol(
        name="witnessed",
        before=(DeviceStep(phase="joining", message=lambda context: Message(payload=b"j")),),
        after=(DeviceStep(phase="training"), DeviceStep(phase="witnessing", message=witness)),
    )
'''
MASKED = '''
"""Pads as masks, which the devices give the coordinator: a stand-in for secure aggregation, without secrets."""

from dataclasses import replace
from hashlib import sha256

import numpy as np

from fanin.edge.rings import Ring, RingVector

RING = Ring(bits=48)


def pad(seed, first, last):
    """Return the pad of a seed from a first to a last position."""
    words = np.frombuffer(seed, "<u4").tolist()
    drawn = np.random.Philox(np.random.SeedSequence(words)).random_raw(last)
    return drawn[first:].view(np.int64)


def coordinator(plan):
    from fanin.server.protocols.exchanging import exchanging
    from fanin.server.protocols.requirements import ring_of
    from fanin.server.protocols.phases import Phase, PhaseExchange

    # 32 bits of a value, and 14 of the weights.
    assert ring_of(plan) == RING, ring_of(plan)

    def correct(facts):
        closed = facts.rosters["training"]
        seeds = [facts.messages["seeding"][device] for device in closed]
        return lambda first, last: -sum(pad(seed, first, last) for seed in seeds)

    seeding = Phase(
        name="seeding",
        gives_places=True,
        assigns=True,
        exchange=PhaseExchange(respond=lambda facts, device: b"seeded", max_bytes=16),
    )
    return replace(exchanging("masked", before=(seeding,)), correct=correct, ring=RING, is_masked=True)


def device():
    from fanin.clients.device.session.protocols import DeviceProtocol, DeviceStep, Message

    def seed(context):
        return Message(payload=context.device.entropy(16))

    def mask(context, update):
        size, weight = update.values.size, update.counts["examples"]
        names = [statistic.name for statistic in context.basis.statistics]
        mine = pad(context.kept["seeding"].message.payload, 0, size + len(names))
        tail = np.array([update.counts.get(name, 0) for name in names], np.int64)
        vector = RingVector(ring=RING, num_values=size, num_tail=len(names))
        return vector.encode(update.values * weight + mine[:size], tail + mine[size:])

    return DeviceProtocol(name="masked", before=(DeviceStep(phase="seeding", message=seed),), mask=mask)
'''


def install_protocols(site: Path) -> None:
    """Install ``commit_reveal`` (of the docs page), ``witnessed`` and ``masked`` in a folder, as by pip."""
    site.mkdir(parents=True, exist_ok=True)
    sources = {
        "commit_reveal": file_block(PAGE.read_text(), "commit_reveal.py"),
        "witnessed": WITNESSED,
        "masked": MASKED,
    }
    for name, source in sources.items():
        install_code(site, name, source, ENTRIES.format(name=name))


@pytest.fixture
def protocols(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the packages for this process."""
    site = tmp_path_factory.mktemp("site")
    install_protocols(site)
    monkeypatch.syspath_prepend(str(site))
    known_protocols.cache_clear()
    yield
    known_protocols.cache_clear()
