"""``fanin device certify``: certificates of devices by an authority, for the threat model ``active``.

It is run by somebody other than the operator of the coordinator, on a machine of their own. It connects to no
coordinator, and reads nothing of one: a coordinator that chose the keys to certify could invent devices.
"""

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from fanin.clients.textfiles import read_text
from fanin.commands.console.terminal import JsonOption, prints_text, publisher_key, write_json
from fanin.edge.files import replace_file, storage_error
from fanin.edge.masking.roster import certificate_of
from fanin.protos.errors import InvalidInput
from fanin.protos.names import check_key
from fanin.protos.texts import counted

PUBLIC_SUFFIX: Final = ".pub"


def certify(
    keys: Annotated[
        list[Path] | None,
        typer.Argument(help="Files with the public keys of devices: device.pub in their folders.", metavar="FILE.pub"),
    ] = None,
    authority: Annotated[
        Path,
        typer.Option(
            "--authority", help="The key of the authority; created on first use, with its public half (.pub)."
        ),
    ] = Path("authority.key"),
    json: JsonOption = "",
) -> None:
    """Certify devices for the threat model active, without a coordinator: FILE.certificate next to each FILE.pub."""
    _check_place(authority)
    # All keys before the first certificate: a wrong one changes nothing.
    devices = {path: _device_key(path) for path in keys or ()}
    signer = publisher_key(authority)
    rows = []
    for path, public in devices.items():
        target = path.with_suffix(".certificate")
        certificate = certificate_of(signer.sign, bytes.fromhex(public)).hex()
        try:
            replace_file(target, f"{certificate}\n".encode())
        except OSError as exc:
            raise storage_error(str(target), exc) from exc
        rows.append({"public_key": public, "certificate": str(target)})
    if json:
        write_json(json, {"authority": signer.public, "devices": rows})
    if prints_text(json):
        lines = [
            f"authority {signer.public}",
            f"  {authority} stays with you; the plan and the floors of devices name the public key",
            f"{counted(len(rows), 'certificate')}"
            + (": copy each to its device as device.certificate" if rows else ""),
            *(f"  {row['public_key'][:16]}..  {row['certificate']}" for row in rows),
        ]
        sys.stdout.write("\n".join(lines) + "\n")


def _device_key(path: Path) -> str:
    """Return the public key of a device. A private key has the same form: it is told by the name of its file."""
    if path.suffix != PUBLIC_SUFFIX:
        raise InvalidInput(
            f"{path}: got the suffix {path.suffix!r}, expected the public key of a device, {PUBLIC_SUFFIX!r}; copy "
            "device.pub from the folder of the device",
            code="FN-0805",
        )
    key = read_text(path, "public key of a device").strip()
    check_key(str(path), key)
    return key


def _check_place(authority: Path) -> None:
    """Raise InvalidInput for a key in the folder of a coordinator: then its operator could certify invented devices."""
    path = authority.resolve()
    for folder in path.parents:
        if (folder / "fanin.db").exists():
            raise InvalidInput(
                f"--authority: {authority} is in the folder of the coordinator {folder}, expected a place to which its "
                "operator has no access; keep the key on another machine",
                code="FN-1723",
            )
