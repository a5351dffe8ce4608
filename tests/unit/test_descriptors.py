"""File descriptors of a process: connections never use those of files, and few descriptors mean lower limits."""

import resource
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises

from fanin.protos.errors import InvalidInput
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
    lower_limits, connections = share_descriptors(descriptors, limits)
    assert OTHER_FILES + lower_limits.max_uploads + connections.max_connections <= descriptors
    # Waiting devices leave connections for devices that upload, and for operators.
    assert 1 <= lower_limits.max_parked < connections.max_connections
    assert 1 <= lower_limits.max_uploads <= max_uploads
    assert lower_limits.max_parked <= max_parked
    if descriptors >= enough_descriptors(limits):
        assert lower_limits == limits


def test_too_few_descriptors_are_refused_with_the_number_and_the_remedy() -> None:
    with raises(
        InvalidInput,
        f"descriptors: this process may open 100, expected at least {LEAST_DESCRIPTORS}; "
        "raise the hard limit (ulimit -Hn, LimitNOFILE= in systemd)",
    ):
        share_descriptors(100, Limits())


@pytest.fixture
def hard_limit() -> Iterator[int]:
    """The hard limit of this process; its soft limit is 300 during the test."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard_limit))
    yield hard_limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))


def test_the_soft_limit_is_raised_to_the_target_or_to_the_hard_limit(hard_limit: int) -> None:
    assert hard_limit > 400
    for target, limit in ((200, 300), (400, 400), (hard_limit + 1, hard_limit)):
        assert raise_descriptor_limit(target) == limit
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, hard_limit)


def test_grpc_receives_every_limit() -> None:
    options = dict(Connections(max_connections=5, max_queued_calls=6, handshake_s=0.5).options())
    assert options["grpc.max_allowed_incoming_connections"] == 5
    # Without these limits gRPC cancels a random part of the calls once more than 1,000 wait.
    assert options["grpc.server.max_pending_requests"] == 6
    assert options["grpc.server.max_pending_requests_hard_limit"] == 6
    assert options["grpc.server_handshake_timeout_ms"] == 500
