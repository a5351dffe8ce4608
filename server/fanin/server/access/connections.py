"""The limits of gRPC connections and calls.

A connection needs a descriptor, and so does a file. ``share_descriptors`` divides the descriptors of the process at
start, so that connections can never use those of the database, the spool and the blobs:

    limit of the process = OTHER_FILES + one for each upload + one for each connection

gRPC enforces the limits through channel arguments. It closes a new connection at once if there are ``max_connections``.
It closes a connection that does not complete TLS and the HTTP/2 settings within ``handshake_s``, and a connection
without a call for ``idle_s``. A connection ends after ``max_age_s``, so that no anonymous stream (of gRPC's health and
reflection services) holds one forever.
"""

import resource
from dataclasses import dataclass, replace
from typing import Final

from fanin.protos.errors import InvalidInput
from fanin.server.access.limits import Limits

OTHER_FILES: Final = 64
"""Descriptors for the database, the libraries, the event loop, the port, and the files that disk threads read."""
LEAST_DESCRIPTORS: Final = 128
"""With fewer descriptors, the coordinator could not serve even a few devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """The limits of one server.

    Attributes:
        max_connections: Open connections, including those that have not completed TLS. An idle one costs some 50 kB.
        max_queued_calls: Calls that gRPC has received and that the event loop has not taken up yet. By default gRPC
            keeps 1,000 and cancels further calls at random, so a burst of check-ins would lose some calls.
        max_calls: Concurrent calls on one connection. A device needs three. A proxy bundles many devices.
        handshake_s: Seconds for TLS and the HTTP/2 settings. A phone on a slow network needs a few.
        idle_s: Seconds that a connection may stay open without a call. fanin's clients close idle connections earlier.
        max_age_s: Seconds after which a connection accepts no new calls. Calls under way may take as long again.
        keepalive_s: Seconds of silence after which the server checks that the peer of a call still exists.
    """

    max_connections: int = 20_000
    max_queued_calls: int = 20_000
    max_calls: int = 1_000
    handshake_s: float = 20.0
    idle_s: float = 300.0
    max_age_s: float = 3_600.0
    keepalive_s: float = 120.0

    def options(self) -> tuple[tuple[str, int], ...]:
        """Return the channel arguments for gRPC."""
        return (
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            # From the hard limit on, gRPC cancels every further call. Between the two limits it cancels at random.
            ("grpc.server.max_pending_requests", self.max_queued_calls),
            ("grpc.server.max_pending_requests_hard_limit", self.max_queued_calls),
            ("grpc.max_concurrent_streams", self.max_calls),
            ("grpc.server_handshake_timeout_ms", _ms(self.handshake_s)),
            ("grpc.max_connection_idle_ms", _ms(self.idle_s)),
            ("grpc.max_connection_age_ms", _ms(self.max_age_s)),
            ("grpc.max_connection_age_grace_ms", _ms(self.max_age_s)),
            ("grpc.keepalive_time_ms", _ms(self.keepalive_s)),
        )


def share_descriptors(descriptors: int, limits: Limits) -> tuple[Limits, Connections]:
    """Divide the descriptors of a process between connections and files.

    Args:
        descriptors: Number of descriptors that the process may open.
        limits: The limits with enough descriptors.

    Returns:
        The limits, lowered if there are too few descriptors, and the limits of connections. A quarter of the
        descriptors is for uploads. Three quarters of the connections are for parked check-ins.

    Raises:
        InvalidInput: There are fewer than ``LEAST_DESCRIPTORS``.
    """
    if descriptors < LEAST_DESCRIPTORS:
        raise InvalidInput(
            f"descriptors: this process may open {descriptors}, expected at least {LEAST_DESCRIPTORS}; "
            "raise the hard limit (ulimit -Hn, LimitNOFILE= in systemd)",
            code="FN-0690",
        )
    max_uploads = min(limits.max_uploads, descriptors // 4)
    max_connections = min(2 * limits.max_parked, descriptors - OTHER_FILES - max_uploads)
    max_parked = min(limits.max_parked, max_connections * 3 // 4)
    connections = Connections(max_connections=max_connections, max_queued_calls=2 * limits.max_parked)
    return replace(limits, max_parked=max_parked, max_uploads=max_uploads), connections


def enough_descriptors(limits: Limits) -> int:
    """Return how many descriptors these limits need."""
    return OTHER_FILES + 4 * max(limits.max_parked, limits.max_uploads)


def raise_descriptor_limit(enough: int) -> int:
    """Raise the soft limit of descriptors to ``enough`` or the hard limit, whichever is lower. Return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return enough if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError):
        # The real limit of some systems (macOS) is below the hard limit that they report.
        return soft
    return target


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
