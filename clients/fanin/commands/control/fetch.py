"""``fanin fetch``: download a Version of a Run, verify it, and write it as an .npz file or a folder.

    OUT.npz                one array a tensor; of a Flower app all arrays, also those that do not travel
    OUT/parameters         the canonical bytes, for ``fanin infer --version``
    OUT/ranges             the ranges of its activations, if it has some, for ``fanin infer``
    OUT/version.json       number, parent, digests, signer and signature
    OUT/bundle/            with --bundle: the Bundle, for ``fanin infer`` and ``fanin inspect``
    FILE.onnx, .tflite     with --onnx and --tflite: a standalone model, int8 or with --app float (``standalone``)

Checks before anything is written:

1. The publisher signed the Bundle's manifest.
2. The publisher, or a run key that it delegated to, signed the Version.
3. The parameters have the Version's digest and the Bundle's tensors.

Different files at OUT are kept unless --force is given. A folder that holds anything else than what fetch writes, also
in a subfolder, is never replaced. A folder that has the Version's Bundle keeps it, also without --bundle.

OUT is renamed into place when it is complete, so a partial Version never has its name (``places``).
"""

import json as jsonlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fanin.clients.textfiles import read_public_key
from fanin.clients.versions import FetchedVersion, fetch_version
from fanin.commands.console.show import note_on_local
from fanin.commands.console.terminal import (
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    RunArgument,
    ServerOption,
    StateOption,
    TokenOption,
    connect,
    prints_text,
    run_command,
    write_json,
)
from fanin.commands.console.usage import check_place, wrong_usage
from fanin.commands.control.places import FACTS, PARAMETERS, check_replaced, put, restore
from fanin.commands.control.standalone import check_targets, precision_of, standalone_models
from fanin.commands.display.bars import byte_bar
from fanin.edge.bundles.bundle import FETCHED_FOLDER, MANIFEST_FILE, Bundle, save_bundle
from fanin.edge.bundles.formats import format_of
from fanin.edge.parameter_files import write_npz
from fanin.edge.ranges import RANGES
from fanin.edge.tensors import decode_parameters
from fanin.protos.errors import InvalidInput, NotFound
from fanin.protos.roles import RoleKind

if TYPE_CHECKING:
    from fanin.clients.operator import Operator

FILES_OF_OTHERS: Final = frozenset((".bin", ".npy", ".onnx", ".pt", ".pth", ".safetensors", ".tflite", ".zip"))
"""Suffixes that name a file of another form, where a folder would surprise."""
NO_RANGES: Final = (
    "the file has no ranges of activations, so fanin infer --version would use those of the bundle; name a folder for "
    "--out, which has them"
)


def main(argv: Sequence[str]) -> int:
    """Run ``fanin fetch``."""
    return run_command(fetch, argv)


def fetch(
    run_id: RunArgument,
    out: Annotated[Path | None, typer.Option("--out", help="Where to write it: FILE.npz, or a folder.")] = None,
    onnx: Annotated[
        Path | None, typer.Option("--onnx", help="Write the int8 model as a plain ONNX file; with --app the float one.")
    ] = None,
    tflite: Annotated[
        Path | None,
        typer.Option("--tflite", help="Write the int8 model as a plain TFLite file; with --app the float one."),
    ] = None,
    app: Annotated[
        str,
        typer.Option("--app", help="The App of the run, for the float model in --onnx and --tflite."),
    ] = "",
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="The version's number; default: the newest.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The best version on held-out data, by the plan's evaluation.best.")
    ] = False,
    bundle: Annotated[bool, typer.Option("--bundle", help="Also write the bundle into the folder.")] = False,
    publisher: Annotated[
        Path | None,
        typer.Option("--publisher", help="File with the public key that must have signed it; default: any signer."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing version.")] = False,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Download a version of a run, verify its signatures and digests, and write it."""
    files = {name: path for name, path in (("onnx", onnx), ("tflite", tflite)) if path is not None}
    with wrong_usage():
        check_targets(files, app)
        _check_folder(out, files, bundle=bundle)
        if best and version is not None:
            raise InvalidInput(f"--best: got --version {version} too, expected one of them", code="FN-1003")
    if out is not None:
        restore(out.resolve())
    trusted = "" if publisher is None else read_public_key(publisher)
    with connect(state, server, ca, token_file, byte_bar) as operator:
        number = best_version(operator, run_id) if best else version
        fetched = fetch_version(operator, run_id, number, trusted)
        opened = fetched.bundle
        with_bundle = bundle or (force and _has_bundle(out, opened))
        artifacts = {name: opened.artifact(name) for name in opened.manifest.artifacts} if with_bundle else None
        models = standalone_models(fetched, files, app)
    for path, data in models.items():
        # Before the first file is written: a refusal of the last one would leave half of the result.
        if path.exists() and (path.is_dir() or path.read_bytes() != data):
            check_replaced(path, _option_of(path), force=force)
    written = {} if out is None else {str(out): save(out, fetched, artifacts, force=force)}
    for path, data in models.items():
        written[str(path)] = save_model(path, data, force=force)
    notes = [note_on_local(fetched.bundle)] if models else []
    if out is not None and out.suffix == ".npz":
        notes += [_note_on_counters(fetched), NO_RANGES if fetched.ranges_data else ""]
    for note in filter(None, notes):
        sys.stderr.write(f"note: {note}\n")
    if json:
        row = {**version_row(fetched), "out": None if out is None else str(out), "written": any(written.values())}
        precision = precision_of(app)[0] if models else None
        write_json(json, {**row, "models": [str(path) for path in models], "precision": precision})
    if not prints_text(json):
        return
    text = f"version {fetched.version.number} of run {run_id}, {fetched.version.sha256}, verified"
    for target, is_new in written.items():
        sys.stdout.write(f"{text}, {'written to' if is_new else 'is there already:'} {target}\n")
    if models:
        sys.stdout.write(f"{precision_of(app)[1]}\n")


def _check_folder(out: Path | None, files: Mapping[str, Path], *, bundle: bool) -> None:
    if out is None and not files:
        raise InvalidInput(
            "--out: got none, expected FILE.npz or a folder, or --onnx FILE or --tflite FILE", code="FN-1006"
        )
    if out is not None and out.suffix in FILES_OF_OTHERS:
        raise InvalidInput(
            f"--out: got {out}, expected FILE.npz or a folder; for a model file use --onnx or --tflite", code="FN-1006"
        )
    for option, path in (("out", out), *files.items()):
        if path is None:
            continue
        is_file = option != "out" or path.suffix == ".npz"
        if path.exists() and path.is_dir() == is_file:
            is_there, name = ("a folder", "a file") if is_file else ("a file", "FILE.npz or a folder")
            raise InvalidInput(f"--{option}: {path} is {is_there}, name {name}", code="FN-1006")
        check_place(f"--{option}", path)
    if bundle and (out is None or out.suffix == ".npz"):
        raise InvalidInput(
            f"--bundle: {out} is a file, name a folder" if out else "--bundle: expected --out FOLDER", code="FN-1004"
        )


def _note_on_counters(fetched: FetchedVersion) -> str:
    """Return a note for an .npz file about the arrays of the module that no Version has; "" if none is known."""
    if fetched.layout is not None:
        local = ", ".join(f"{name} ({value.dtype})" for name, value in fetched.layout.local.items())
        return f"{local}: the values of the initial arrays, because these arrays do not travel" if local else ""
    if any(role.role is RoleKind.STATISTIC for role in fetched.bundle.manifest.table.roles.values()):
        return "the file has no num_batches_tracked, which does not travel; use load_state_dict(state, strict=False)"
    return ""


def _has_bundle(out: Path | None, bundle: Bundle) -> bool:
    """Return whether the folder ``out`` has this Bundle."""
    manifest = None if out is None else out / FETCHED_FOLDER / MANIFEST_FILE
    return manifest is not None and manifest.is_file() and manifest.read_bytes() == bundle.signed.data


def best_version(operator: "Operator", run_id: str) -> int:
    """Return the number of a Run's best Version on held-out data. Raises NotFound without an evaluation."""
    evaluation = operator.run(run_id).best_evaluation
    if evaluation is None:
        raise NotFound(
            f"run {run_id}: got no evaluated version, expected at least one; its plan names no data in "
            "[evaluation], or no evaluation has ended yet (fanin evaluations)",
            code="FN-1018",
        )
    return evaluation.version


def version_row(fetched: FetchedVersion) -> dict[str, object]:
    """Return the JSON row of a Version: its identity, and everything that its signature covers."""
    version = fetched.version
    delegation = version.delegation
    return {
        "run_id": version.run_id,
        "epoch": version.epoch,
        "version": version.number,
        "parent": version.parent,
        "version_sha256": version.sha256,
        "auxiliary_sha256": {name: tensor.sha256 for name, tensor in version.auxiliary.items()},
        "bundle_sha256": version.bundle_sha256,
        "publisher": fetched.bundle.signed.public_key,
        "public_key": version.public_key,
        "signature": version.signature.hex(),
        "delegation_signature": None if delegation is None else delegation.signature.hex(),
    }


def save(out: Path, fetched: FetchedVersion, artifacts: Mapping[str, bytes] | None, *, force: bool) -> bool:
    """Write a Version, all or nothing.

    Args:
        out: An .npz file or a folder.
        fetched: The Version.
        artifacts: The Bundle's artifacts by name; None to write no Bundle.
        force: Replace an existing Version.

    Returns:
        True if it was written, False if ``out`` already holds the same files.

    Raises:
        Conflict: ``out`` has other content.
    """

    def write_file(draft: Path) -> None:
        table, flat = decode_parameters(fetched.data)
        views = table.views(flat)
        write_npz(draft, views if fetched.layout is None else fetched.layout.complete(views))

    def write_folder(draft: Path) -> None:
        (draft / PARAMETERS).write_bytes(fetched.data)
        if fetched.ranges_data:
            (draft / RANGES).write_bytes(fetched.ranges_data)
        (draft / FACTS).write_text(jsonlib.dumps(version_row(fetched), indent=1) + "\n", encoding="utf-8")
        if artifacts is not None:
            save_bundle(draft / FETCHED_FOLDER, fetched.bundle.signed, artifacts)

    is_file = out.suffix == ".npz"
    return put(out, write_file if is_file else write_folder, is_file=is_file, option="--out", force=force)


def save_model(path: Path, data: bytes, *, force: bool) -> bool:
    """Write a model file, all or nothing, as ``save`` does."""

    def write_file(draft: Path) -> None:
        draft.write_bytes(data)

    return put(path, write_file, is_file=True, option=_option_of(path), force=force)


def _option_of(path: Path) -> str:
    return f"--{format_of(path.name)}"
