"""``fanin device``: the devices of a coordinator, their labels and tags, bans and removals."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fanin.commands.administration.certify import certify
from fanin.commands.administration.rows import device_lines, device_row, tags_of
from fanin.commands.administration.selection import (
    ChangedDevices,
    DeviceFilters,
    DevicesArgument,
    DryRunOption,
    OnlyOption,
    PrefixOption,
    TagOption,
    UnseenOption,
    YesOption,
    change_all,
    device_table,
    pages_of,
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
    AnyDeviceChange,
    BanDevice,
    DeviceChange,
    DeviceInfo,
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
        "certify": certify,
    }
    return run_verb("device", "List, label, ban, remove or certify the devices of a coordinator.", verbs, argv)


def list_devices(
    tag: TagOption = None,
    state_filter: OnlyOption = "",
    prefix: PrefixOption = None,
    unseen_days: UnseenOption = None,
    after: Annotated[str, typer.Option("--after", metavar="DEVICE", help="Only devices after this id.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=0, help="Most devices to list; 0: all.")] = 100,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """List the devices, in the order of their ids."""
    filters = DeviceFilters(tags=tag or (), only=state_filter, prefixes=prefix or (), unseen_days=unseen_days)
    with wrong_usage():
        queries = filters.queries(after)
    infos: list[DeviceInfo] = []
    with administrator(state, server, ca, token_file) as client:
        for page in pages_of(client, queries):
            infos += page.devices
            # One more than the limit, to know whether devices follow.
            if limit and len(infos) > limit:
                break
    has_more = bool(limit) and len(infos) > limit
    infos = infos[:limit] if limit else infos
    if json:
        row = {"num_devices": page.num_devices, "next": infos[-1].device_id if has_more else None}
        write_json(json, {"devices": [device_row(info) for info in infos], **row})
    if prints_text(json):
        none = "no device is selected" if filters else "no devices; enroll one with: fanin join --token-file FILE"
        print_tables(device_table(infos) if infos else none)
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
    words: Annotated[
        list[str], typer.Argument(metavar="[DEVICE]... LABEL", help='Ids of devices, and the label; "" removes it.')
    ],
    tag: TagOption = None,
    state_filter: OnlyOption = "",
    prefix: PrefixOption = None,
    unseen_days: UnseenOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> int:
    """Set the label of devices."""
    filters = DeviceFilters(tags=tag or (), only=state_filter, prefixes=prefix or (), unseen_days=unseen_days)
    *ids, text = words
    with wrong_usage():
        what = LabelDevice(label=text)
    target = ChangedDevices(ids=ids, filters=filters, yes=yes, dry_run=dry_run)
    return _change(target, what, (state, server, ca, token_file), json)


def tag(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DEVICE]... [NAME=VALUE]...", help="Ids of devices, and the tags to set."),
    ] = None,
    remove_names: Annotated[
        list[str] | None, typer.Option("--remove", metavar="NAME", help="Tag to remove; repeatable.")
    ] = None,
    tag: TagOption = None,
    state_filter: OnlyOption = "",
    prefix: PrefixOption = None,
    unseen_days: UnseenOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> int:
    """Set and remove tags of devices."""
    filters = DeviceFilters(tags=tag or (), only=state_filter, prefixes=prefix or (), unseen_days=unseen_days)
    # No id of a device has an equals sign.
    tags = [word for word in words or () if "=" in word]
    ids = [word for word in words or () if "=" not in word]
    with wrong_usage():
        what = TagDevice(set=tags_of(tags, "tag"), remove=tuple(remove_names or ()))
        if not what.set and not what.remove:
            raise InvalidInput("tag: got none, expected NAME=VALUE or --remove NAME", code="FN-1008")
    target = ChangedDevices(ids=ids, filters=filters, yes=yes, dry_run=dry_run)
    return _change(target, what, (state, server, ca, token_file), json)


def ban(
    devices: DevicesArgument = None,
    reason: Annotated[str, typer.Option("--reason", help="Reason, for operators; a device does not receive it.")] = "",
    tag: TagOption = None,
    state_filter: OnlyOption = "",
    prefix: PrefixOption = None,
    unseen_days: UnseenOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> int:
    """Ban devices: their calls end, their places are free, and they are refused until the ban is lifted."""
    filters = DeviceFilters(tags=tag or (), only=state_filter, prefixes=prefix or (), unseen_days=unseen_days)
    with wrong_usage():
        what = BanDevice(reason=reason)
    target = ChangedDevices(ids=devices or (), filters=filters, yes=yes, dry_run=dry_run)
    return _change(target, what, (state, server, ca, token_file), json)


def unban(
    devices: DevicesArgument = None,
    tag: TagOption = None,
    state_filter: OnlyOption = "",
    prefix: PrefixOption = None,
    unseen_days: UnseenOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> int:
    """Lift the ban of devices. Their programs must be started again."""
    filters = DeviceFilters(tags=tag or (), only=state_filter, prefixes=prefix or (), unseen_days=unseen_days)
    target = ChangedDevices(ids=devices or (), filters=filters, yes=yes, dry_run=dry_run)
    return _change(target, UnbanDevice(), (state, server, ca, token_file), json)


def remove(
    devices: DevicesArgument = None,
    tag: TagOption = None,
    state_filter: OnlyOption = "",
    prefix: PrefixOption = None,
    unseen_days: UnseenOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> int:
    """Delete devices with their keys: their calls end, and they must enroll again with a token."""
    filters = DeviceFilters(tags=tag or (), only=state_filter, prefixes=prefix or (), unseen_days=unseen_days)
    target = ChangedDevices(ids=devices or (), filters=filters, yes=yes, dry_run=dry_run)
    return _change(target, RemoveDevice(), (state, server, ca, token_file), json)


def _change(
    target: ChangedDevices, what: AnyDeviceChange, place: tuple[Path, str, Path | None, Path | None], json: str
) -> int:
    """Change devices. A single one by its id needs no question, and is printed with all that is known of it."""
    with wrong_usage():
        target.queries()
        single = None
        if len(target.ids) == 1 and not target.dry_run:
            single = DeviceChange(device_id=target.ids[0], what=what)
    with administrator(*place) as client:
        if single is None:
            return change_all(client, target, what, json)
        _print_changed(client.change_device(single), what, json)
    return 0


def _print_changed(info: DeviceInfo, what: AnyDeviceChange, json: str) -> None:
    if isinstance(what, RemoveDevice) and prints_text(json):
        sys.stdout.write(f"device {info.device_id}: removed; it was:\n")
    _print(info, json)


def _print(info: DeviceInfo, json: str) -> None:
    if json:
        write_json(json, device_row(info))
    if prints_text(json):
        sys.stdout.write(device_lines(info))
