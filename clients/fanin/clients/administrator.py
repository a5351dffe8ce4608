"""The administrator's client: tokens, devices and the audit log.

``access.proto`` specifies the guarantees of each call, and docs/howto/access.md the role that it needs.
"""

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Final, Self, TypeVar

from google.protobuf.message import Message

from fanin.clients.arguments import check_text, check_type, clean_token
from fanin.clients.transport import CallOptions, Connection
from fanin.protos.calls import AUTHORIZATION, BEARER
from fanin.protos.messages import (
    AuditChain,
    AuditPage,
    DeviceChange,
    DeviceInfo,
    DevicePage,
    DeviceQuery,
    LedgerPage,
    LostInterval,
    NewToken,
    PopulationPage,
    PrivacyPopulation,
    TokenInfo,
    TokenPage,
    TokenRotation,
)
from fanin.protos.wire import from_proto, to_proto
from fanin.v1 import access_pb2 as pb

ReplyT = TypeVar("ReplyT", bound=Message)
ACCESS: Final = "/fanin.v1.Access/"
CALL_S: Final = 60.0
SECRET_BYTES: Final = 24
"""192 random bits cannot be guessed, not even from the digest."""


class Administrator:
    """An administrator's client of one coordinator. Every method raises FaninError and nothing else.

    Example::

        with Administrator.connect("127.0.0.1:7443", ca_certificate, token) as administrator:
            for device in administrator.devices():
                print(device.device_id, device.label, device.state.value)
    """

    def __init__(self, connection: Connection, token: str) -> None:
        """Create a client over an open connection. Raises InvalidInput for a wrong argument.

        Args:
            connection: The connection.
            token: The token of a person; white space around it is removed.
        """
        check_type("administrator: connection", connection, Connection)
        self._connection = connection
        metadata = ((AUTHORIZATION, f"{BEARER}{clean_token('administrator: token', token)}"),)
        self._call = CallOptions(metadata=metadata, timeout_s=CALL_S)

    @classmethod
    @contextmanager
    def connect(cls, address: str, ca_certificate: bytes, token: str) -> Iterator[Self]:
        """Connect to a coordinator; the connection closes when the context ends. See ``Operator.connect``."""
        check_text("connect: address", address)
        check_type("connect: ca_certificate", ca_certificate, bytes)
        with closing(Connection(address, ca_certificate)) as connection:
            yield cls(connection, token)

    def create_token(self, new: NewToken) -> TokenInfo:
        """Create a token from the digest of its secret (``new_secret``). Repeating the call changes nothing more.

        Raises:
            PermissionDenied: The role of this client's token does not permit it.
            Conflict: Another token has the name.
        """
        check_type("create_token: new", new, NewToken)
        request = to_proto(new, pb.CreateTokenRequest)
        return from_proto(TokenInfo, self._unary("CreateToken", request, pb.TokenInfo))

    def tokens(self) -> Iterator[TokenInfo]:
        """Yield the tokens that this client may manage, in the order of their names."""
        after = ""
        while True:
            reply = self._unary("ListTokens", pb.ListTokensRequest(after=after), pb.ListTokensReply)
            page = from_proto(TokenPage, reply)
            yield from page.tokens
            after = page.next
            if not after:
                return

    def rotate_token(self, rotation: TokenRotation) -> TokenInfo:
        """Replace the secret of a token. Raises NotFound, Conflict, PermissionDenied."""
        request = to_proto(rotation, pb.RotateTokenRequest)
        return from_proto(TokenInfo, self._unary("RotateToken", request, pb.TokenInfo))

    def revoke_token(self, name: str) -> TokenInfo:
        """Revoke a token and end its calls. Raises NotFound, Conflict, PermissionDenied."""
        check_text("revoke_token: name", name)
        return from_proto(TokenInfo, self._unary("RevokeToken", pb.RevokeTokenRequest(name=name), pb.TokenInfo))

    def device_page(self, query: DeviceQuery) -> DevicePage:
        """Return a page of the devices, in the order of their ids. Only a page with an empty ``next`` is the last."""
        check_type("device_page: query", query, DeviceQuery)
        request = to_proto(query, pb.ListDevicesRequest)
        return from_proto(DevicePage, self._unary("ListDevices", request, pb.ListDevicesReply))

    def devices(self, query: DeviceQuery | None = None) -> Iterator[DeviceInfo]:
        """Yield the devices of a query, in the order of their ids; default: all devices."""
        current = DeviceQuery() if query is None else query
        while True:
            page = self.device_page(current)
            yield from page.devices
            if not page.next:
                return
            current = replace(current, after=page.next)

    def device(self, device_id: str) -> DeviceInfo:
        """Return a device. Raises NotFound."""
        check_text("device: device_id", device_id)
        request = pb.GetDeviceRequest(device_id=device_id)
        return from_proto(DeviceInfo, self._unary("GetDevice", request, pb.DeviceInfo))

    def change_device(self, change: DeviceChange) -> DeviceInfo:
        """Label, tag, ban, unban or remove a device. Return it after the change. Raises NotFound, PermissionDenied."""
        check_type("change_device: change", change, DeviceChange)
        request = to_proto(change, pb.ChangeDeviceRequest)
        return from_proto(DeviceInfo, self._unary("ChangeDevice", request, pb.DeviceInfo))

    def audit_page(self, from_sequence: int = 1) -> AuditPage:
        """Return a page of the audit log, from an entry on. Its digests are not verified (``verify_audit``)."""
        check_type("audit_page: from_sequence", from_sequence, int)
        request = pb.ListAuditRequest(from_sequence=from_sequence)
        return from_proto(AuditPage, self._unary("ListAudit", request, pb.ListAuditReply))

    def verify_audit(self, head: str = "") -> AuditChain:
        """Read the whole audit log, and verify it here.

        Args:
            head: A digest that was kept elsewhere; "" without one.

        Raises:
            Corrupted: An entry was changed, exchanged or removed, or the log does not contain the head.
        """
        chain = AuditChain(head)
        while (page := self.audit_page(chain.num_entries + 1)).entries:
            chain.add(page.entries)
        chain.finish(page)
        return chain

    def populations(self) -> Iterator[PrivacyPopulation]:
        """Yield the populations whose privacy budgets Runs share, in the order of their names."""
        after = ""
        while True:
            reply = self._unary("ListPopulations", pb.ListPopulationsRequest(after=after), pb.ListPopulationsReply)
            page = from_proto(PopulationPage, reply)
            yield from page.populations
            after = page.next
            if not after:
                return

    def ledger_page(self, population: str, from_number: int = 1) -> LedgerPage:
        """Return rows of a privacy ledger from a number on. Only a page without rows is after the last one.

        Raises:
            NotFound: There is no such population.
        """
        check_text("ledger_page: population", population)
        request = pb.ListLedgerRequest(population=population, from_number=from_number)
        return from_proto(LedgerPage, self._unary("ListLedger", request, pb.ListLedgerReply))

    def charge(self, lost: LostInterval) -> PrivacyPopulation:
        """Charge Rounds that a restored coordinator does not know. Repeating the request charges nothing more.

        Raises:
            NotFound: There is no such population, or no such Run in it.
            Conflict: The ledger has a newer row than ``lost.after``.
            PermissionDenied: The token has not the role admin.
        """
        check_type("charge: lost", lost, LostInterval)
        request = to_proto(lost, pb.ChargePopulationRequest)
        return from_proto(PrivacyPopulation, self._unary("ChargePopulation", request, pb.PrivacyPopulation))

    def _unary(self, method: str, request: Message, reply: type[ReplyT]) -> ReplyT:
        return self._connection.unary(f"{ACCESS}{method}", request.SerializeToString(), reply.FromString, self._call)


def new_secret() -> tuple[str, str]:
    """Return a new secret for a token, and its digest for the coordinator, which never receives the secret."""
    secret = secrets.token_urlsafe(SECRET_BYTES)
    return secret, hashlib.sha256(secret.encode()).hexdigest()
