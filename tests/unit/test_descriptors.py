"""File descriptors of a process: connections never use those of files, and few descriptors mean lower limits."""

import resource
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises

from fanin.protos.errors import Conflict
from fanin.server.access.connections import (
    LEAST_DESCRIPTORS,
    OTHER_FILES,
    Connections,
    enough_descriptors,
    raise_descriptor_limit,
    share_descriptors,
)
from fanin.server.access.limits import Limits


@given(
    descriptors=st.integers(LEAST_DESCRIPTORS, 1 << 20),
    max_parked=st.integers(1, 100_000),
    max_uploads=st.integers(1, 100_000),
)
def test_files_and_connections_fit_together(descriptors: int, max_parked: int, max_uploads: int) -> None:
    limits = Limits(max_parked=max_parked, max_uploads=max_uploads)
    lowered, connections = share_descriptors(descriptors, limits)
    assert OTHER_FILES + lowered.max_uploads + connections.max_connections <= descriptors
    # Waiting devices leave connections for devices that upload, and for operators.
    assert 1 <= lowered.max_parked < connections.max_connections
    assert 1 <= lowered.max_uploads <= max_uploads
    assert lowered.max_parked <= max_parked
    if descriptors >= enough_descriptors(limits):
        assert lowered == limits


def test_too_few_descriptors_are_refused_with_the_number_and_what_to_do() -> None:
    with raises(
        Conflict,
        f"descriptors: this process may open 100, expected at least {LEAST_DESCRIPTORS}; "
        "raise the hard limit (ulimit -Hn, LimitNOFILE= in systemd)",
    ):
        share_descriptors(100, Limits())


@pytest.fixture
def hard() -> Iterator[int]:
    """The hard limit of this process; its soft limit is 300 during the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_is_raised_to_what_is_enough_or_to_the_hard_one(hard: int) -> None:
    assert hard > 400
    for enough, raised in ((200, 300), (400, 400), (hard + 1, hard)):
        assert raise_descriptor_limit(enough) == raised
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (raised, hard)


def test_grpc_is_told_every_limit() -> None:
    options = dict(Connections(max_connections=5, max_queued_calls=6, handshake_s=0.5).options())
    assert options["grpc.max_allowed_incoming_connections"] == 5
    # Without these limits gRPC cancels a random part of the calls once more than 1,000 wait.
    assert options["grpc.server.max_pending_requests"] == 6
    assert options["grpc.server.max_pending_requests_hard_limit"] == 6
    assert options["grpc.server_handshake_timeout_ms"] == 500
