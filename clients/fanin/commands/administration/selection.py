"""The devices that a command of ``fanin device`` is about: named one by one, or selected by what is known of them.

A change of several devices shows them and asks first. Each change is a call of its own with its entry in the audit log,
so a device that cannot be changed leaves the others alone.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Table

from fanin.commands.administration.rows import condition_text, device_row, tags_of, tags_text, time_text
from fanin.commands.console.streams import printable
from fanin.commands.console.tables import print_tables
from fanin.commands.console.terminal import prints_text, write_json
from fanin.protos.errors import FaninError, InvalidInput, Unavailable
from fanin.protos.messages import (
    AnyDeviceChange,
    BanDevice,
    DeviceChange,
    DeviceInfo,
    DevicePage,
    DeviceQuery,
    DeviceState,
    LabelDevice,
    RemoveDevice,
    TagDevice,
    UnbanDevice,
)
from fanin.protos.names import check_name
from fanin.protos.texts import counted

if TYPE_CHECKING:
    from fanin.clients.administrator import Administrator

DAY_S: Final = 86_400.0
STATES: Final = tuple(state.value for state in DeviceState)
DONE: Final = MappingProxyType(
    {
        LabelDevice: "labelled",
        TagDevice: "tagged",
        BanDevice: "banned",
        UnbanDevice: "unbanned",
        RemoveDevice: "removed",
    }
)
MAX_SHOWN: Final = 100
"""Devices in the table before the question."""

DevicesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[DEVICE]...", help="Ids of devices; fanin device list shows them.")
]
TagOption = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="NAME=VALUE", help="Only devices with this tag; repeatable: with all of them."),
]
OnlyOption = Annotated[
    str, typer.Option("--only", metavar=f"[{'|'.join(STATES)}]", help="Only devices that are in this state.")
]
PrefixOption = Annotated[
    list[str] | None,
    typer.Option("--prefix", metavar="TEXT", help="Only devices whose id begins so; repeatable: with any of them."),
]
UnseenOption = Annotated[
    float | None,
    typer.Option("--unseen-days", min=0, help="Only devices without a check-in, or enrollment, for so many days."),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Change several devices without a question.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show the devices, and change none.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFilters:
    """What a selection knows of its devices. Without any value it selects all."""

    tags: Sequence[str] = ()
    only: str = ""
    prefixes: Sequence[str] = ()
    unseen_days: float | None = None

    def __bool__(self) -> bool:
        return bool(self.tags or self.only or self.prefixes) or self.unseen_days is not None

    def queries(self, after: str = "") -> tuple[DeviceQuery, ...]:
        """Return the queries whose devices are the selected ones, in the order of the ids. Raises InvalidInput."""
        if self.only and self.only not in STATES:
            raise InvalidInput(f"--only: got {self.only!r}, expected one of {', '.join(STATES)}", code="FN-1008")
        for prefix in self.prefixes:
            check_name("--prefix", prefix)
        query = DeviceQuery(
            after=after,
            tags=tags_of(self.tags),
            state=DeviceState(self.only) if self.only else None,
            unseen_s=None if self.unseen_days is None else self.unseen_days * DAY_S,
        )
        prefixes: list[str] = []
        for prefix in sorted(self.prefixes):
            # An id may begin with several of them.
            if not prefixes or not prefix.startswith(prefixes[-1]):
                prefixes.append(prefix)
        return tuple(replace(query, prefix=prefix) for prefix in prefixes) or (query,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedDevices:
    """The devices that a command changes.

    Attributes:
        ids: Their ids, or none with filters.
        filters: What selects them, if no ids do.
        yes: Whether to ask no question.
        dry_run: Whether to change nothing.
    """

    ids: Sequence[str]
    filters: DeviceFilters
    yes: bool
    dry_run: bool

    def queries(self) -> tuple[DeviceQuery, ...]:
        """Return the queries of the filters. Raises InvalidInput unless there are either ids or filters."""
        if bool(self.ids) is bool(self.filters):
            named = f"{self.ids[0]} and a selection" if self.ids else "no DEVICE and no selection"
            raise InvalidInput(
                f"DEVICE: got {named}, expected ids, or one or more of --tag, --only, --prefix and --unseen-days",
                code="FN-1471",
            )
        return self.filters.queries() if self.filters else ()


def pages_of(client: "Administrator", queries: Sequence[DeviceQuery]) -> Iterator[DevicePage]:
    """Yield the pages of queries, one after the other."""
    for query in queries:
        page = client.device_page(query)
        yield page
        while page.next:
            page = client.device_page(replace(query, after=page.next))
            yield page


def change_all(client: "Administrator", target: ChangedDevices, what: AnyDeviceChange, json: str) -> int:
    """Change the devices of a target, after a question if there are several.

    Args:
        client: The client.
        target: The devices.
        what: The change.
        json: The value of ``--json``.

    Returns:
        The exit status: 1 if a device could not be changed.
    """
    problems: dict[str, FaninError] = {}
    selected = _selected(client, target, problems)
    if prints_text(json):
        _show(selected)
        _report(problems)
    changed: list[DeviceInfo] = []
    if selected and not target.dry_run:
        _ask(len(selected), what, target)
        early = len(problems)
        for info in selected:
            try:
                after = client.change_device(DeviceChange(device_id=info.device_id, what=what))
            except Unavailable:
                raise
            except FaninError as exc:
                problems[info.device_id] = exc
            else:
                changed.append(after)
                if prints_text(json):
                    sys.stdout.write(f"device {info.device_id}: {DONE[type(what)]}\n")
        if prints_text(json):
            _report(dict([*problems.items()][early:]))
    if json:
        rows = {device: {"problem": str(problem), "code": problem.code} for device, problem in problems.items()}
        shown = selected if target.dry_run else changed
        row = {"devices": [device_row(info) for info in shown], "not_changed": rows, "dry_run": target.dry_run}
        write_json(json, row)
    return int(bool(problems))


def _selected(client: "Administrator", target: ChangedDevices, problems: dict[str, FaninError]) -> list[DeviceInfo]:
    infos = [info for page in pages_of(client, target.queries()) for info in page.devices]
    for device in dict.fromkeys(target.ids):
        try:
            infos.append(client.device(device))
        except Unavailable:
            raise
        except FaninError as exc:
            problems[device] = exc
    return infos


def _ask(num_devices: int, what: AnyDeviceChange, target: ChangedDevices) -> None:
    """Ask whether to change the devices. Raises InvalidInput without a terminal, and Abort for a no."""
    if target.yes:
        return
    verb = type(what).__name__.removesuffix("Device").lower()
    if not sys.stdin.isatty():
        raise InvalidInput(
            f"{verb}: {counted(num_devices, 'device')} would change, and there is no terminal to ask; pass --yes, or "
            "--dry-run to see them",
            code="FN-1472",
        )
    sys.stderr.write(f"{verb} {counted(num_devices, 'device')}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InvalidInput(f"{verb}: not confirmed, so no device was changed", code="FN-1473")


def _show(infos: Sequence[DeviceInfo]) -> None:
    print_tables(device_table(infos[:MAX_SHOWN]) if infos else "no device is selected")
    if len(infos) > MAX_SHOWN:
        sys.stdout.write(f"and {counted(len(infos) - MAX_SHOWN, 'device')} more\n")


def _report(problems: dict[str, FaninError]) -> None:
    for problem in problems.values():
        sys.stdout.write(f"not changed: {printable(str(problem))}\n")


def device_table(infos: Sequence[DeviceInfo]) -> Table:
    """Return devices as a table."""
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
