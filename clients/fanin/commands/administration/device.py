"""``fanin device``: the devices of a coordinator, their labels and tags, bans and removals."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fanin.commands.administration.rows import (
    condition_text,
    device_lines,
    device_row,
    tags_of,
    tags_text,
    time_text,
)
from fanin.commands.administration.verbs import Verbs, administrator, run_verb
from fanin.commands.console.tables import print_tables
from fanin.commands.console.terminal import (
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    ServerOption,
    StateOption,
    TokenOption,
    prints_text,
    write_json,
)
from fanin.commands.console.usage import wrong_usage
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import (
    BanDevice,
    DeviceChange,
    DeviceInfo,
    DeviceQuery,
    DeviceState,
    LabelDevice,
    RemoveDevice,
    TagDevice,
    UnbanDevice,
)

DeviceArgument = Annotated[str, typer.Argument(metavar="DEVICE", help="Id of the device; fanin device list shows it.")]


def main(argv: Sequence[str]) -> int:
    """Run ``fanin device``."""
    verbs: Verbs = {
        "list": list_devices,
        "show": show,
        "label": label,
        "tag": tag,
        "ban": ban,
        "unban": unban,
        "remove": remove,
    }
    return run_verb("device", "List, label, ban and remove the devices of a coordinator.", verbs, argv)


def list_devices(
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="NAME=VALUE", help="Only devices with this tag; repeatable: with all of them."),
    ] = None,
    state_filter: Annotated[
        str,
        typer.Option("--only", metavar="STATE", help="Only devices that are banned, working, waiting, new or away."),
    ] = "",
    after: Annotated[str, typer.Option("--after", metavar="DEVICE", help="Only devices after this id.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=0, help="Most devices to list; 0: all.")] = 100,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """List the devices, in the order of their ids."""
    with wrong_usage():
        query = DeviceQuery(after=after, tags=tags_of(tag or ()), state=_state(state_filter))
    infos: list[DeviceInfo] = []
    with administrator(state, server, ca, token_file) as client:
        while True:
            page = client.device_page(query)
            infos += page.devices
            # One more than the limit, to know whether devices follow.
            if not page.next or (limit and len(infos) > limit):
                break
            query = replace(query, after=page.next)
    has_more = bool(limit) and len(infos) > limit
    infos = infos[:limit] if limit else infos
    if json:
        row = {"num_devices": page.num_devices, "next": infos[-1].device_id if has_more else None}
        write_json(json, {"devices": [device_row(info) for info in infos], **row})
    if prints_text(json):
        print_tables(_table(infos) if infos else "no devices; enroll one with: fanin join --token-file FILE")
        if has_more:
            sys.stdout.write(f"more devices follow: --after {infos[-1].device_id}, or --limit 0 for all\n")


def show(
    device: DeviceArgument,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Show a device."""
    with administrator(state, server, ca, token_file) as client:
        _print(client.device(device), json)


def label(
    device: DeviceArgument,
    text: Annotated[str, typer.Argument(metavar="LABEL", help='The label; "" removes it.')],
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Set the label of a device."""
    with wrong_usage():
        change = DeviceChange(device_id=device, what=LabelDevice(label=text))
    _change(change, (state, server, ca, token_file), json)


def tag(
    device: DeviceArgument,
    tags: Annotated[list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Tags to set.")] = None,
    remove_names: Annotated[
        list[str] | None, typer.Option("--remove", metavar="NAME", help="Tag to remove; repeatable.")
    ] = None,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Set and remove tags of a device."""
    with wrong_usage():
        what = TagDevice(set=tags_of(tags or (), "tag"), remove=tuple(remove_names or ()))
        if not what.set and not what.remove:
            raise InvalidInput("tag: got none, expected NAME=VALUE or --remove NAME", code="FN-1008")
        change = DeviceChange(device_id=device, what=what)
    _change(change, (state, server, ca, token_file), json)


def ban(
    device: DeviceArgument,
    reason: Annotated[
        str, typer.Option("--reason", help="Reason, for operators; the device does not receive it.")
    ] = "",
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Ban a device: its calls end, its place is free, and it is refused until the ban is lifted."""
    with wrong_usage():
        change = DeviceChange(device_id=device, what=BanDevice(reason=reason))
    _change(change, (state, server, ca, token_file), json)


def unban(
    device: DeviceArgument,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Lift the ban of a device. Its program must be started again."""
    _change(DeviceChange(device_id=device, what=UnbanDevice()), (state, server, ca, token_file), json)


def remove(
    device: DeviceArgument,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Delete a device with its key: its calls end, and it must enroll again with a token."""
    _change(DeviceChange(device_id=device, what=RemoveDevice()), (state, server, ca, token_file), json)


def _change(change: DeviceChange, place: tuple[Path, str, Path | None, Path | None], json: str) -> None:
    with administrator(*place) as client:
        info = client.change_device(change)
    if isinstance(change.what, RemoveDevice) and prints_text(json):
        sys.stdout.write(f"device {info.device_id}: removed; it was:\n")
    _print(info, json)


def _state(text: str) -> DeviceState | None:
    if not text:
        return None
    known = [state.value for state in DeviceState]
    if text not in known:
        raise InvalidInput(f"--only: got {text!r}, expected one of {', '.join(known)}", code="FN-1008")
    return DeviceState(text)


def _print(info: DeviceInfo, json: str) -> None:
    if json:
        write_json(json, device_row(info))
    if prints_text(json):
        sys.stdout.write(device_lines(info))


def _table(infos: Sequence[DeviceInfo]) -> Table:
    table = Table()
    # Users copy the id into the next command, so it must not wrap.
    table.add_column("device", no_wrap=True)
    for heading in ("label", "tags", "state", "last seen", "runtime", "condition", "updates"):
        table.add_column(heading)
    for info in infos:
        seen, condition = time_text(info.last_seen), condition_text(info.condition)
        known = (info.label, tags_text(info.tags), info.state.value, seen, ", ".join(info.runtimes), condition)
        table.add_row(info.device_id, *known, str(info.num_updates))
    return table
