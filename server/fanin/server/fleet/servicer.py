"""``fanin.v1.Fleet``: each call decodes its message, calls the Coordinator, and encodes the result."""

from collections.abc import AsyncIterator
from contextlib import suppress

from fanin.protos.errors import InvalidInput
from fanin.protos.messages import (
    CheckIn,
    CheckInReply,
    Download,
    Enrollment,
    ExchangeReply,
    ExchangeRequest,
    Piece,
    Report,
    UpdateHeader,
    UploadRequest,
)
from fanin.protos.wire import from_proto, to_proto
from fanin.server.access.interceptors import newcomer_of, principal_of
from fanin.server.access.registry import Registry, token_sha256
from fanin.server.fleet.coordinator import Coordinator
from fanin.server.storage.stores import Stores
from fanin.v1 import fleet_pb2, fleet_pb2_grpc


class FleetService(fleet_pb2_grpc.FleetServicer):
    """``fanin.v1.Fleet`` over a Coordinator."""

    def __init__(self, coordinator: Coordinator, registry: Registry, stores: Stores) -> None:
        self._coordinator = coordinator
        self._registry = registry
        self._stores = stores

    async def Enroll(self, request: fleet_pb2.EnrollRequest, context: object) -> fleet_pb2.EnrollReply:
        """See fleet.proto."""
        enrollment, who = from_proto(Enrollment, request), newcomer_of(context)
        device = self._registry.check_enrollment(enrollment, who.call, who.signature)
        self._registry.use_time(device, who.call)
        await self._stores.enroll(device, token_sha256(enrollment.token))
        return fleet_pb2.EnrollReply(device_id=device.device_id)

    async def CheckIn(self, request: fleet_pb2.CheckInRequest, context: object) -> fleet_pb2.CheckInReply:
        """See fleet.proto."""
        answer = await self._coordinator.check_in(principal_of(context).id, from_proto(CheckIn, request))
        return to_proto(CheckInReply(answer=answer), fleet_pb2.CheckInReply)

    async def Download(
        self, request: fleet_pb2.DownloadRequest, context: object
    ) -> AsyncIterator[fleet_pb2.DownloadPiece]:
        """See fleet.proto."""
        pieces = self._coordinator.download(principal_of(context).id, from_proto(Download, request))
        # Not ``async for``: its loop variable would keep a piece in memory while it is sent.
        with suppress(StopAsyncIteration):
            while True:
                yield fleet_pb2.DownloadPiece(data=await anext(pieces))

    async def Upload(
        self, request_iterator: AsyncIterator[fleet_pb2.UploadRequest], context: object
    ) -> AsyncIterator[fleet_pb2.UploadReply]:
        """See fleet.proto."""
        device = principal_of(context).id
        try:
            first = await anext(request_iterator, None)
            header = None if first is None else from_proto(UploadRequest, first).part
            if not isinstance(header, UpdateHeader):
                raise InvalidInput("upload: got no header, expected it as the first request", code="FN-0130")
        except InvalidInput as exc:
            self._coordinator.refuse(device, str(exc))
            raise
        async for reply in self._coordinator.upload(device, header, _pieces(request_iterator)):
            yield to_proto(reply, fleet_pb2.UploadReply)

    async def Report(self, request: fleet_pb2.ReportRequest, context: object) -> fleet_pb2.ReportReply:
        """See fleet.proto."""
        reply = await self._coordinator.report(principal_of(context).id, from_proto(Report, request))
        return to_proto(reply, fleet_pb2.ReportReply)

    async def Exchange(self, request: fleet_pb2.ExchangeRequest, context: object) -> fleet_pb2.ExchangeReply:
        """See fleet.proto."""
        outcome = await self._coordinator.exchange(principal_of(context).id, from_proto(ExchangeRequest, request))
        return to_proto(ExchangeReply(outcome=outcome), fleet_pb2.ExchangeReply)


async def _pieces(requests: AsyncIterator[fleet_pb2.UploadRequest]) -> AsyncIterator[Piece]:
    # Not ``async for``: its loop variable would keep a piece in memory for each upload that waits.
    with suppress(StopAsyncIteration):
        while True:
            yield _piece(await anext(requests))


def _piece(request: fleet_pb2.UploadRequest) -> Piece:
    part = from_proto(UploadRequest, request).part
    if not isinstance(part, Piece):
        raise InvalidInput("upload: got a second header, expected pieces", code="FN-0130")
    return part
