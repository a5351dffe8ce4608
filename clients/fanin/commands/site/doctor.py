"""``fanin doctor``: why a device or a coordinator cannot be reached, and the command that corrects it.

    fanin doctor --server HOST:PORT --ca FILE [--token-file FILE]     from any machine; or --ca-fingerprint SHA256
    fanin doctor --state DIR                                          for a device, or a coordinator, of this machine

It needs the core install alone. It changes nothing, and does not use the token up.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from fanin.clients.arguments import clean_token
from fanin.clients.device.site.record import SiteRecord, read_record
from fanin.clients.device.site.view import UNWRITTEN, SiteState, ended_text, error_text, remedy, site_view
from fanin.clients.device.storage.cache import Cache
from fanin.clients.doctor.checks import CheckResult, Level, fail, failed, ok, skip, warn
from fanin.clients.doctor.machine import disk_finding, files_finding, gpu_finding, release_finding, runtime_findings
from fanin.clients.doctor.network import network_findings
from fanin.clients.pins import check_kept, parse_fingerprint, pinned_authority
from fanin.clients.route import route_to
from fanin.clients.textfiles import read_text
from fanin.commands.console.usage import Parser, WrongUsage, check_target, wrong_usage
from fanin.edge.bundles.keys import SigningKey, load_or_create_key
from fanin.edge.files import is_held
from fanin.protos.addresses import Address, check_remote
from fanin.protos.errors import FaninError, InvalidInput

MARKS: Final = {Level.OK: "ok", Level.WARN: "warn", Level.FAIL: "FAIL", Level.SKIP: "-"}
RECENT_S: Final = 600.0
"""Age in seconds up to which the last error of a connected device is a finding."""
DEVICE_TOKEN: Final = "tokens/device.token"
COORDINATOR_SECRETS: Final = ("fanin.db", "fanin.db-wal", "tls/ca.key", "tls/server.key", "tokens/operator.token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """What is examined: where the coordinator is, and what a client of it has."""

    server: str = ""
    ca_file: Path | None = None
    ca_fingerprint: str = ""
    token_file: Path | None = None
    folder: Path = Path("fanin-device")
    key: SigningKey | None = None
    secrets: tuple[Path, ...] = ()
    is_coordinator: bool = False


def main(argv: Sequence[str]) -> int:
    """Run ``fanin doctor``."""
    options = _parser().parsed(argv)
    if not options.server and options.state is None:
        raise WrongUsage(
            "--server: got none, expected HOST:PORT, or --state with the folder of a device or a coordinator"
        )
    with wrong_usage():
        check_target("--json", options.json or "")
        if options.ca_fingerprint is not None:
            options.ca_fingerprint = parse_fingerprint("--ca-fingerprint", options.ca_fingerprint)
        patient, findings = _patient(options)
        target = check_remote("--server", patient.server) if patient.server else None
    findings = _once([*findings, *_findings(patient, target)])
    num_failed = sum(each.level is Level.FAIL for each in findings)
    if options.json is None:
        sys.stdout.write(_text(findings, num_failed))
    else:
        rows = [{**asdict(each), "level": each.level.value} for each in findings]
        text = json.dumps({"ok": not num_failed, "server": patient.server, "findings": rows}, indent=2) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text, "utf-8")
    return 1 if num_failed else 0


def _patient(options: argparse.Namespace) -> tuple[Patient, list[CheckResult]]:
    """Return what is examined, and the findings of its folder. Options replace what the folder says."""
    patient, findings = Patient(), list[CheckResult]()
    if options.state is not None:
        folder = Path(options.state)
        patient, findings = _owned(folder, options.server)
    patient = replace(
        patient,
        server=options.server or patient.server,
        ca_file=Path(options.ca) if options.ca else patient.ca_file,
        ca_fingerprint=options.ca_fingerprint or patient.ca_fingerprint,
        token_file=Path(options.token_file) if options.token_file else patient.token_file,
    )
    return patient, findings


def _owned(folder: Path, server: str) -> tuple[Patient, list[CheckResult]]:
    """Return the device or the coordinator of a folder, and the findings of the folder."""
    try:
        return _coordinator(folder) if (folder / "fanin.db").exists() else _device(folder)
    except PermissionError as exc:
        # The check of the files names the owner.
        return Patient(folder=folder), [skip("process", f"{exc.filename} may not be read by this user: see files")]
    except InvalidInput as exc:
        if not server:
            raise
        return Patient(folder=folder), [replace(skip("process", str(exc)), code=exc.code)]


def _coordinator(folder: Path) -> tuple[Patient, list[CheckResult]]:
    secrets = tuple(folder / name for name in COORDINATOR_SECRETS)
    token = folder / DEVICE_TOKEN
    patient = Patient(
        server=_line(folder / "address"),
        ca_file=folder / "tls" / "ca.pem",
        token_file=token if token.exists() else None,
        folder=folder,
        secrets=secrets,
        is_coordinator=True,
    )
    if is_held(folder):
        return patient, [ok("process", f"a coordinator serves from {folder}")]
    start = f"fanin serve --state {folder}"
    return patient, [fail("process", f"no coordinator serves from {folder}", start)]


def _device(folder: Path) -> tuple[Patient, list[CheckResult]]:
    view = site_view(folder, time.time())
    record = read_record(folder) or SiteRecord()
    place = record.place
    patient = Patient(
        server=place.server,
        # A device with a fingerprint stores the authority at its first connection.
        ca_file=Path(place.ca_file)
        if place.ca_file and (not place.ca_fingerprint or Path(place.ca_file).exists())
        else None,
        ca_fingerprint=place.ca_fingerprint,
        token_file=Path(place.token_file) if place.token_file and Path(place.token_file).exists() else None,
        folder=folder,
        key=load_or_create_key(folder / "device.key") if Cache.is_device(folder) else None,
        secrets=(folder / "device.key", folder / "device.secret"),
    )
    if not place.server:
        text = f"{folder} does not name its coordinator: {UNWRITTEN}; see disk and files"
        return patient, [warn("process", text, "pass --server HOST:PORT and --ca FILE")]
    finding = ok("process", "the device runs and is connected")
    last = record.errors[-1] if record.errors else None
    if last is not None and view.now - last.at < RECENT_S:
        finding = warn("process", f"the device runs and is connected, but {error_text(last, '')}", remedy(last.code))
    if view.state is SiteState.STOPPED:
        text = f"the device is stopped{'' if record.connected_at else ', and has never connected'}: "
        text += ended_text(record)
        if record.link.reason and record.link.reason != record.ended:
            text += f"; last reason: {record.link.reason}"
        finding = warn("process", text, remedy(record.link.code) or "start fanin join again")
    elif view.state is SiteState.DISCONNECTED:
        finding = warn("process", f"the device runs and is not connected: {record.link.reason or 'it is starting'}")
        finding = replace(finding, fix=remedy(record.link.code))
    return patient, [replace(finding, code=record.link.code or finding.code)]


def _once(findings: Sequence[CheckResult]) -> list[CheckResult]:
    """Return the findings. A reason of the process that a check repeats is printed by that check alone."""
    checks = {each.code: each.check for each in findings if each.code and each.check != "process"}
    return [
        replace(each, text=f"{each.text.partition(':')[0]}: see {checks[each.code]}", fix="")
        if each.check == "process" and each.code in checks
        else each
        for each in findings
    ]


def _findings(patient: Patient, target: Address | None) -> Iterator[CheckResult]:
    yield release_finding()
    if target is None:
        yield skip("name", "no coordinator to examine: pass --server and --ca")
    else:
        yield from _reach(patient, target)
    yield disk_finding(patient.folder)
    token = () if patient.token_file is None else (patient.token_file,)
    yield files_finding(patient.folder, (*patient.secrets, *token))
    yield from runtime_findings(is_needed=not patient.is_coordinator)
    yield gpu_finding()


def _reach(patient: Patient, target: Address) -> Iterator[CheckResult]:
    # Imported here: the help, and a coordinator that cannot be reached, need no grpc.
    from fanin.clients.doctor.calls import call_findings
    from fanin.clients.transport import Connection

    ca_certificate = None
    if patient.ca_file is not None:
        try:
            ca_certificate = read_text(patient.ca_file, "--ca").encode()
            if patient.ca_fingerprint:
                check_kept(patient.ca_file, ca_certificate, patient.ca_fingerprint)
        except InvalidInput as exc:
            yield failed("ca", exc)
    network = network_findings(target, ca_certificate, fingerprint=patient.ca_fingerprint)
    yield from network
    if not (ca_certificate or patient.ca_fingerprint) or any(
        each.check == "tls" and each.level in (Level.FAIL, Level.SKIP) for each in network
    ):
        yield from (skip(name, "needs a connection that verifies") for name in ("clock", "protocol", "token"))
        return
    try:
        token = _token(patient)
    except InvalidInput as exc:
        token = ""
        yield failed("token", exc)
    try:
        # As fanin join reads it: tls has found that the coordinator presents it.
        ca_certificate = ca_certificate or pinned_authority(route_to(target, os.environ), patient.ca_fingerprint)
        with closing(Connection(str(target), ca_certificate)) as connection:
            for finding in call_findings(connection, token, patient.key):
                # An operator may have revoked the first enrollment token on purpose, and created others.
                is_own = patient.is_coordinator and patient.token_file == patient.folder / DEVICE_TOKEN
                is_revoked = finding.check == "token" and finding.level is Level.FAIL
                yield replace(finding, level=Level.WARN) if is_own and is_revoked else finding
    except FaninError as exc:
        yield failed("calls", exc)


def _token(patient: Patient) -> str:
    if patient.token_file is not None:
        return clean_token(f"--token-file: {patient.token_file}", read_text(patient.token_file, "--token-file"))
    for variable in ("FANIN_DEVICE_TOKEN", "FANIN_OPERATOR_TOKEN"):
        if os.environ.get(variable, "").strip():
            return clean_token(variable, os.environ[variable])
    return ""


def _text(findings: Sequence[CheckResult], num_failed: int) -> str:
    width = max(len(each.check) for each in findings) + 2
    lines = []
    for each in findings:
        code = f" [{each.code}]" if each.code and each.code not in each.text else ""
        lines.append(f"{MARKS[each.level]:<6}{each.check:{width}}{each.text}{code}")
        if each.fix and each.level is not Level.OK:
            lines.append(f"{'':<6}{'':{width}}-> {each.fix}")
    verdict = f"{num_failed} of {len(findings)} checks failed" if num_failed else "no check failed"
    return "\n".join([*lines, verdict, ""])


def _line(path: Path) -> str:
    with suppress(OSError):
        return path.read_text("utf-8").strip()
    return ""


def _parser() -> Parser:
    parser = Parser(
        prog="fanin doctor",
        description="Find out why a device or a coordinator cannot be reached. Each check prints what is wrong and the "
        "command that corrects it. Nothing is changed, and a token is not used up.",
        epilog="Exit status: 0 no check failed, 1 a check failed, 2 wrong usage.",
    )
    parser.add_argument("--server", default="", metavar="HOST:PORT", help="the coordinator; default: from --state")
    parser.add_argument(
        "--ca", metavar="FILE", help="certificate of the coordinator's authority; default: from --state"
    )
    parser.add_argument(
        "--ca-fingerprint",
        metavar="SHA256",
        help="fingerprint of that certificate, which the coordinator's operator has; default: from --state",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="enrollment token or operator's token; default: from --state, $FANIN_DEVICE_TOKEN",
    )
    parser.add_argument("--state", metavar="DIR", help="folder of a device or of a coordinator on this machine")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON: to standard output instead of the text, or to FILE"
    )
    return parser
