"""The gRPC servicer of Access: it decodes its messages and calls ``Tokens``, ``Devices``, ``Populations`` or the audit
log.
"""

from collections.abc import Iterable
from typing import TypeVar

from google.protobuf.message import Message

from fanin.protos.messages import MAX_PAGE_BYTES, DeviceChange, DeviceQuery, LostInterval, NewToken, TokenRotation
from fanin.protos.wire import from_proto, to_proto
from fanin.server.access.interceptors import principal_of
from fanin.server.administration.devices import Devices
from fanin.server.administration.tokens import Tokens
from fanin.server.runs.populations import Populations
from fanin.server.storage.protocols.tokens import AuditStore
from fanin.v1 import access_pb2, access_pb2_grpc

M = TypeVar("M", bound=Message)


class AccessService(access_pb2_grpc.AccessServicer):
    """``fanin.v1.Access``."""

    def __init__(self, tokens: Tokens, devices: Devices, audit: AuditStore, populations: Populations) -> None:
        self._tokens = tokens
        self._devices = devices
        self._audit = audit
        self._populations = populations

    async def CreateToken(self, request: access_pb2.CreateTokenRequest, context: object) -> access_pb2.TokenInfo:
        """See access.proto."""
        token = await self._tokens.create(from_proto(NewToken, request), principal_of(context))
        return to_proto(token, access_pb2.TokenInfo)

    async def ListTokens(self, request: access_pb2.ListTokensRequest, context: object) -> access_pb2.ListTokensReply:
        """See access.proto."""
        page = await self._tokens.page(request.after, principal_of(context))
        return to_proto(page, access_pb2.ListTokensReply)

    async def RotateToken(self, request: access_pb2.RotateTokenRequest, context: object) -> access_pb2.TokenInfo:
        """See access.proto."""
        token = await self._tokens.rotate(from_proto(TokenRotation, request), principal_of(context))
        return to_proto(token, access_pb2.TokenInfo)

    async def RevokeToken(self, request: access_pb2.RevokeTokenRequest, context: object) -> access_pb2.TokenInfo:
        """See access.proto."""
        return to_proto(await self._tokens.revoke(request.name, principal_of(context)), access_pb2.TokenInfo)

    async def ListDevices(self, request: access_pb2.ListDevicesRequest, context: object) -> access_pb2.ListDevicesReply:
        """See access.proto."""
        page = await self._devices.page(from_proto(DeviceQuery, request))
        devices = fitting((to_proto(info, access_pb2.DeviceInfo) for info in page.devices), MAX_PAGE_BYTES)
        following = page.next if len(devices) == len(page.devices) else devices[-1].device_id
        return access_pb2.ListDevicesReply(devices=devices, next=following, num_devices=page.num_devices)

    async def GetDevice(self, request: access_pb2.GetDeviceRequest, context: object) -> access_pb2.DeviceInfo:
        """See access.proto."""
        return to_proto(await self._devices.device(request.device_id), access_pb2.DeviceInfo)

    async def ChangeDevice(self, request: access_pb2.ChangeDeviceRequest, context: object) -> access_pb2.DeviceInfo:
        """See access.proto."""
        info = await self._devices.change(from_proto(DeviceChange, request), principal_of(context))
        return to_proto(info, access_pb2.DeviceInfo)

    async def ListAudit(self, request: access_pb2.ListAuditRequest, context: object) -> access_pb2.ListAuditReply:
        """See access.proto."""
        page = await self._audit.audit_page(request.from_sequence)
        entries = fitting((to_proto(entry, access_pb2.AuditEntry) for entry in page.entries), MAX_PAGE_BYTES)
        return access_pb2.ListAuditReply(entries=entries, num_entries=page.num_entries, head=page.head)

    async def ListPopulations(
        self, request: access_pb2.ListPopulationsRequest, context: object
    ) -> access_pb2.ListPopulationsReply:
        """See access.proto."""
        page = await self._populations.page(request.after)
        rows = fitting((to_proto(each, access_pb2.PrivacyPopulation) for each in page.populations), MAX_PAGE_BYTES)
        following = page.next if len(rows) == len(page.populations) else rows[-1].name
        return access_pb2.ListPopulationsReply(populations=rows, next=following)

    async def ListLedger(self, request: access_pb2.ListLedgerRequest, context: object) -> access_pb2.ListLedgerReply:
        """See access.proto."""
        page = await self._populations.ledger(request.population, request.from_number)
        rows = fitting((to_proto(each, access_pb2.LedgerRow) for each in page.rows), MAX_PAGE_BYTES)
        population = to_proto(page.population, access_pb2.PrivacyPopulation)
        return access_pb2.ListLedgerReply(population=population, rows=rows)

    async def ChargePopulation(
        self, request: access_pb2.ChargePopulationRequest, context: object
    ) -> access_pb2.PrivacyPopulation:
        """See access.proto."""
        population = await self._populations.charge(from_proto(LostInterval, request), principal_of(context))
        return to_proto(population, access_pb2.PrivacyPopulation)


def fitting(messages: Iterable[M], max_bytes: int) -> list[M]:
    """Return the first messages of a page that fit a size, at least one if there is one.

    A client of gRPC refuses a message of more than 4 MiB, and could not read any page after it.
    """
    page, size_bytes = list[M](), 0
    for message in messages:
        size_bytes += message.ByteSize()
        if page and size_bytes > max_bytes:
            break
        page.append(message)
    return page
