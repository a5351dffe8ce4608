"""``fanin fetch``: a Version of a Run, verified, as a file of arrays or as a folder.

    OUT.npz                an array a tensor
    OUT/parameters         the canonical bytes, which ``fanin infer --version`` takes
    OUT/version.json       what it is, who signed it, and the signature
    OUT/bundle/            with --bundle: the Bundle, which ``fanin infer`` and ``fanin inspect`` take

Before anything is written: the Bundle's manifest is signed by the publisher, the Version by the publisher or a run key
that it delegated to, and the parameters have the Version's digest and the Bundle's tensors. What is there already and
differs is kept, unless --force says otherwise, and no folder with other files in it is ever replaced; no half of a
Version is ever there under its name.
"""

import json as jsonlib
import os
import secrets
import shutil
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer

from fanin.clients.operator import Operator
from fanin.clients.textfiles import read_text
from fanin.commands.terminal import (
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    RunArgument,
    ServerOption,
    StateOption,
    TokenOption,
    connect,
    run_command,
    write_json,
)
from fanin.edge.bundles.bundle import Bundle, SignedManifest, save_bundle
from fanin.edge.bundles.versions import check_version
from fanin.edge.files import sync_folder
from fanin.edge.tensors import decode_parameters
from fanin.protos.chunks import assemble
from fanin.protos.errors import Conflict, InvalidInput, InvalidVersion
from fanin.protos.messages import Version
from fanin.protos.names import check_key

PARAMETERS: Final = "parameters"
FACTS: Final = "version.json"
BUNDLE: Final = "bundle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A Version, its canonical bytes and its Bundle, all verified."""

    version: Version
    data: bytes
    bundle: Bundle


def main(argv: Sequence[str]) -> int:
    """The command."""
    return run_command(fetch, argv)


def fetch(
    run_id: RunArgument,
    out: Annotated[Path, typer.Option("--out", help="Where to put it: FILE.npz, or a folder.")],
    version: Annotated[int | None, typer.Option("--version", min=0, help="Its number; default: the newest.")] = None,
    bundle: Annotated[bool, typer.Option("--bundle", help="The bundle too, into the folder.")] = False,
    publisher: Annotated[
        Path | None,
        typer.Option("--publisher", help="File with the public key that must have signed it; default: whoever did."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Download a version of a run, verify its signature and digest, and write it."""
    if bundle and out.suffix == ".npz":
        raise InvalidInput(f"--bundle: {out} is a file, name a folder")
    trusted = "" if publisher is None else read_text(publisher, "--publisher").strip()
    if trusted:
        check_key(f"--publisher: {publisher}", trusted)
    line, operator = connect(state, server, ca, token_file)
    found = fetch_version(operator, run_id, version, trusted)
    artifacts = {name: found.bundle.artifact(name) for name in found.bundle.manifest.artifacts} if bundle else None
    line.close()
    is_new = save(out, found, artifacts, force=force)
    row = {**facts_of(found), "out": str(out), "written": is_new}
    if json:
        write_json(json, row)
    else:
        done = "written to" if is_new else "is there already:"
        text = f"version {found.version.number} of run {run_id}, {found.version.sha256}, verified, {done} {out}"
        sys.stdout.write(f"{text}\n")


def fetch_version(operator: Operator, run_id: str, number: int | None, publisher: str) -> Fetched:
    """A Version with its Bundle; an empty ``publisher`` trusts whoever signed the Bundle.

    Raises InvalidBundle, InvalidVersion for what does not verify, NotFound.
    """
    found = operator.version(run_id, number)
    data = assemble("manifest", found.bundle.manifest, operator.chunk)
    signed = SignedManifest(data=data, public_key=found.bundle.public_key, signature=found.bundle.signature)
    bundle = Bundle.open(signed, trusted=(publisher or signed.public_key,), read=operator.chunk)
    version = found.version
    check_version(version, run_id=run_id, bundle_sha256=bundle.sha256, publisher=signed.public_key, seen=-1)
    what = f"version {version.number} of run {run_id}"
    if number is not None and version.number != number:
        raise InvalidVersion(f"{what}: got this one, expected number {number}")
    parameters = operator.parameter_bytes(version)
    if decode_parameters(parameters)[0] != bundle.manifest.table:
        raise InvalidVersion(f"{what}: names or shapes differ from its bundle's")
    return Fetched(version=version, data=parameters, bundle=bundle)


def facts_of(found: Fetched) -> dict[str, object]:
    """What a Version is, and what its signature covers."""
    version = found.version
    delegation = version.delegation
    return {
        "run_id": version.run_id,
        "version": version.number,
        "parent": version.parent,
        "version_sha256": version.sha256,
        "bundle_sha256": version.bundle_sha256,
        "publisher": found.bundle.signed.public_key,
        "public_key": version.public_key,
        "signature": version.signature.hex(),
        "delegation_signature": None if delegation is None else delegation.signature.hex(),
    }


def save(out: Path, found: Fetched, artifacts: Mapping[str, bytes] | None, *, force: bool) -> bool:
    """Write a Version, all or nothing; whether it was not there yet. Raises Conflict for something else there."""

    def write_file(draft: Path) -> None:
        table, flat = decode_parameters(found.data)
        # Not numpy.savez: it takes arrays as keywords, and a tensor may be called like one of its own.
        with zipfile.ZipFile(draft, "w") as archive:
            for name, array in table.views(flat).items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    def write_folder(draft: Path) -> None:
        draft.mkdir()
        (draft / PARAMETERS).write_bytes(found.data)
        (draft / FACTS).write_text(jsonlib.dumps(facts_of(found), indent=1) + "\n")
        if artifacts is not None:
            save_bundle(draft / BUNDLE, found.bundle.signed, artifacts)

    return _put(out, write_file if out.suffix == ".npz" else write_folder, force=force)


def _put(out: Path, write: Callable[[Path], None], *, force: bool) -> bool:
    draft = out.with_name(f".{out.name}.{secrets.token_hex(4)}.new")
    try:
        write(draft)
        contents = _contents(draft)
        if out.exists():
            # What was fetched before, with or without the Bundle, is not fetched in vain.
            if contents.items() <= _contents(out).items():
                return False
            if not force or not _is_fetched(out):
                raise Conflict(f"{out}: something else is there; name another --out, or, if it is a version, --force")
            _remove(out)
        for path in (draft, *draft.rglob("*")):
            _sync(path)
        draft.replace(out)
        sync_folder(out.parent)
        return True
    finally:
        _remove(draft)


def _is_fetched(out: Path) -> bool:
    """Whether nothing is lost but what can be fetched again: a file, or a folder with a Version and nothing else."""
    return out.is_file() or {path.name for path in out.iterdir()} <= {PARAMETERS, FACTS, BUNDLE}


def _contents(path: Path) -> dict[str, bytes]:
    """The files of a folder, or the one file, by relative name."""
    files = [found for found in path.rglob("*") if found.is_file()] if path.is_dir() else [path]
    return {str(found.relative_to(path)): found.read_bytes() for found in files}


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
