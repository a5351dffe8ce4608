"""``fanin audit``: the chained log of the changes at a coordinator, and its verification."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fanin.commands.administration.rows import audit_row, time_text
from fanin.commands.administration.verbs import Verbs, administrator, run_verb
from fanin.commands.console.streams import printable
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
from fanin.protos.calls import MICROSECONDS
from fanin.protos.errors import Corrupted, NotFound
from fanin.protos.messages import AuditChain, AuditEntry
from fanin.protos.names import check_digest
from fanin.protos.texts import counted


def main(argv: Sequence[str]) -> int:
    """Run ``fanin audit``."""
    verbs: Verbs = {"list": list_entries, "verify": verify}
    return run_verb("audit", "Read and verify the log of the changes at a coordinator.", verbs, argv)


def list_entries(
    from_sequence: Annotated[int, typer.Option("--from", min=1, help="Number of the first entry.")] = 1,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Most entries to list; 0: all.")] = 0,
    last: Annotated[int, typer.Option("--last", min=0, help="List this many of the newest entries.")] = 0,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """List the entries of the audit log, oldest first. Needs the role admin."""
    entries: list[AuditEntry] = []
    with administrator(state, server, ca, token_file) as client:
        start = from_sequence
        if last:
            start = max(start, client.audit_page(start).num_entries - last + 1)
        while (page := client.audit_page(start)).entries and not (limit and len(entries) >= limit):
            entries += page.entries
            start = page.entries[-1].sequence + 1
    entries = entries[:limit] if limit else entries
    if json:
        write_json(json, {"entries": [audit_row(entry) for entry in entries], "head": page.head})
    if prints_text(json):
        sys.stdout.write("".join(map(line_of, entries)))
        sys.stdout.write(f"{counted(page.num_entries, 'entry', 'entries')}, head {page.head}\n")


def verify(
    head: Annotated[
        str | None,
        typer.Option("--head", metavar="DIGEST", help="A head that was kept elsewhere; the log must contain it."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", help="Folder of a coordinator: read fanin.db itself, also while none serves from it."),
    ] = None,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> int:
    """Recompute the digests of the audit log. Exit status 1 if an entry was changed, removed or exchanged.

    Without --server the log is read from the folder. Without --head a log that was cut at its end cannot be noticed.
    """
    with wrong_usage():
        if head is not None:
            check_digest("--head", head)
    chain = AuditChain(head or "")
    problem = code = ""
    try:
        _read(chain, state or DEFAULT_STATE, (server, ca, token_file))
    except Corrupted as exc:
        problem, code = str(exc), exc.code
    if json:
        row = {
            "entries": chain.num_entries,
            "head": chain.digest,
            "verified": not problem,
            "problem": problem,
            "code": code,
        }
        restores = [audit_row(entry) for entry in chain.restores]
        write_json(json, row | {"head_entry": chain.head_sequence or None, "restores": restores})
    if prints_text(json):
        contains = f"; entry {chain.head_sequence} is the given head" if chain.head_sequence else ""
        good = f"{counted(chain.num_entries, 'entry', 'entries')} verified, head {chain.digest}{contains}\n"
        sys.stdout.write(f"{problem} [{code}]\n" if problem else good + "".join(map(line_of, chain.restores)))
    return int(bool(problem))


def _read(chain: AuditChain, state: Path, remote: tuple[str, Path | None, Path | None]) -> None:
    """Verify the log of a coordinator that serves, or of a folder."""
    server, ca, token_file = remote
    if server:
        with administrator(state, server, ca, token_file) as client:
            while (page := client.audit_page(chain.num_entries + 1)).entries:
                chain.add(page.entries)
        chain.finish(page)
        return
    if not (state / "fanin.db").exists():
        raise NotFound(f"{state}: not a coordinator's folder, fanin.db is missing; give --state", code="FN-1012")
    # Imported here: a coordinator elsewhere needs no database.
    from fanin.server.folder import open_audit

    read = open_audit(state)
    while (page := read(chain.num_entries + 1)).entries:
        chain.add(page.entries)
    chain.finish(page)


def line_of(entry: AuditEntry) -> str:
    """Return an entry on one line. A line feed in it could forge another entry."""
    time = time_text(entry.time_us / MICROSECONDS)
    text = f"{entry.sequence:6} {time} {entry.principal}: {entry.call} {entry.subject} [{entry.outcome}]"
    return f"{printable(text)}\n"
