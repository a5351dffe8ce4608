"""The devices of the page: a list, one device, and what an operator changes of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from fanin.protos.errors import InvalidInput, NotFound
from fanin.protos.messages import (
    BanDevice,
    DeviceChange,
    DeviceQuery,
    DeviceState,
    LabelDevice,
    RemoveDevice,
    UnbanDevice,
)
from fanin.protos.names import check_name
from fanin.server.administration.devices import Devices
from fanin.server.web.guard import form_of, operator_of
from fanin.server.web.rendering import page

HOME: Final = "/devices"
PAGE_DEVICES: Final = 50
REMOVED: Final = "The device is removed. It must enroll again."


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceViews:
    """The pages and actions of devices.

    Attributes:
        desk: The devices.
        join_line: The command with which a device joins.
    """

    desk: Devices
    join_line: str

    async def devices(self, request: Request) -> Response:
        """Show the devices of a state and a tag, in the order of their ids."""
        query = _query_of(request.query_params)
        devices = await self.desk.page(query)
        rows, following = devices.devices[:PAGE_DEVICES], devices.next
        if len(rows) < len(devices.devices):
            following = rows[-1].device_id
        shown = {name: request.query_params.get(name, "") for name in ("state", "tag")}
        filters = "&".join(f"{name}={quote(value)}" for name, value in shown.items() if value)
        return page(
            request,
            "devices.html",
            {
                "devices": rows,
                "next": following,
                "num_devices": devices.num_devices,
                "after": query.after,
                "filters": filters,
                "states": [each.value for each in DeviceState],
                "shown": shown,
                "join_line": self.join_line,
                "done": await self._removal(request.query_params.get("removed", "")),
            },
        )

    async def device(self, request: Request) -> Response:
        """Show a device."""
        device = await self.desk.device(_id_of(request))
        # A link may say anything: only what is so is shown.
        texts = {
            "label": f"The label is {device.label}." if device.label else "The device has no label.",
            "ban": "The device is banned." if device.ban is not None else "",
            "unban": "The device is not banned." if device.ban is None else "",
        }
        return page(
            request, "device.html", {"device": device, "done": texts.get(request.query_params.get("done", ""), "")}
        )

    async def change(self, request: Request) -> Response:
        """Label, ban or remove a device."""
        by, form, device_id = operator_of(request), form_of(request), _id_of(request)
        kind = form.get("what", "")
        if kind not in _CHANGES:
            raise InvalidInput(f"device: got {kind[:32]!r}, expected one of {', '.join(_CHANGES)}", code="FN-1424")
        await self.desk.change(DeviceChange(device_id=device_id, what=_CHANGES[kind](form)), by)
        if kind == "remove":
            return RedirectResponse(f"{HOME}?removed={quote(device_id, safe='')}", status_code=303)
        return RedirectResponse(f"{HOME}/{quote(device_id, safe='')}?done={kind}", status_code=303)

    async def _removal(self, device_id: str) -> str:
        """Return what the list says after a removal; "" if the device is enrolled."""
        if not device_id:
            return ""
        check_name("device", device_id)
        try:
            await self.desk.device(device_id)
        except NotFound:
            return REMOVED
        return ""


def _query_of(params: Mapping[str, str]) -> DeviceQuery:
    """Return the query of a URL. Raises InvalidInput."""
    states = {each.value: each for each in DeviceState}
    state, tag, after = (params.get(name, "") for name in ("state", "tag", "after"))
    if state and state not in states:
        raise InvalidInput(
            f"devices: got the state {state[:32]!r}, expected one of {', '.join(states)}", code="FN-1424"
        )
    name, _, value = tag.strip().partition("=")
    if after:
        check_name("devices: after", after)
    return DeviceQuery(after=after, tags={name: value} if name else {}, state=states.get(state))


def _id_of(request: Request) -> str:
    device_id: str = request.path_params["device_id"]
    check_name("device", device_id)
    return device_id


_CHANGES: Final[dict[str, Callable[[Mapping[str, str]], LabelDevice | BanDevice | UnbanDevice | RemoveDevice]]] = {
    "label": lambda form: LabelDevice(label=form.get("label", "").strip()),
    "ban": lambda form: BanDevice(reason=form.get("reason", "").strip()),
    "unban": lambda _form: UnbanDevice(),
    "remove": lambda _form: RemoveDevice(),
}
