"""The checks of this machine: its release and Python, disk, files, runtimes and GPU."""

import os
import platform
import shutil
import stat
import subprocess
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from fanin.clients.device.site.record import RECORD_FILE
from fanin.clients.doctor.checks import CheckResult, fail, ok, warn, within
from fanin.edge.runtimes.available import RUNTIMES, RuntimeRecord
from fanin.protos.messages import OLDEST_PROTOCOL, PROTOCOL
from fanin.protos.release import __version__

LITTLE_BYTES: Final = 1 << 30
"""Free bytes below which a check warns. A device keeps up to 256 MB of downloads by default."""
TOO_LITTLE_BYTES: Final = 64 << 20
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
NVIDIA_SMI: Final = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
MAX_GPU_CHARS: Final = 300


def release_finding() -> CheckResult:
    """Return the finding about this installation."""
    protocols = f"protocol {PROTOCOL}" if OLDEST_PROTOCOL == PROTOCOL else f"protocols {OLDEST_PROTOCOL} to {PROTOCOL}"
    system = f"{platform.system()} {platform.machine()}"
    return ok("release", f"fanin {__version__}, {protocols}, Python {platform.python_version()}, {system}")


def disk_finding(folder: Path) -> CheckResult:
    """Return the finding about the space for a folder, which may not exist yet."""
    free = shutil.disk_usage(_existing(folder)).free
    text = f"{free / 1e9:.1f} GB are free for {folder}"
    fix = f"free some space, see: du -sh {folder}; or choose another --state"
    if free < TOO_LITTLE_BYTES:
        return fail("disk", text, fix)
    return warn("disk", text, fix) if free < LITTLE_BYTES else ok("disk", text)


def files_finding(folder: Path, secrets: Collection[Path]) -> CheckResult:
    """Return the finding about the permissions of a folder and of the secrets in it."""
    place = _existing(folder)
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return _of_other_user("write in", place)
    unreadable = [path for path in (*secrets, folder / RECORD_FILE) if path.exists() and not os.access(path, os.R_OK)]
    if unreadable:
        return _of_other_user("read", unreadable[0])
    is_private = not place.stat().st_mode & _OTHERS
    exposed = [path for path in secrets if path.exists() and path.stat().st_mode & _OTHERS]
    if exposed and not is_private:
        names = " ".join(str(path) for path in exposed)
        return warn("files", f"other users of this machine can read or change {names}", f"chmod go= {names}")
    return ok("files", f"{folder} is writable, and its keys are private")


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists and that this user can see."""
    for place in (folder, *folder.absolute().parents):
        with suppress(PermissionError):
            if place.is_dir():
                return place
    return Path("/")


def _of_other_user(action: str, path: Path) -> CheckResult:
    owner, user = path.stat().st_uid, os.geteuid()
    return fail(
        "files",
        f"this user ({user}) may not {action} {path}, which belongs to user {owner}",
        f"start fanin as that user (sudo -u '#{owner}' fanin ...), or give it to this one: chown -R {user} {path}",
    )


def runtime_findings(*, is_needed: bool) -> Iterator[CheckResult]:
    """Yield the finding about the runtimes: a device needs one."""
    installed = [f"{record.title} {_version(record)}" for record in RUNTIMES.values() if _is_installed(record)]
    if installed:
        yield ok("runtimes", f"installed: {', '.join(installed)}")
    elif is_needed:
        yield fail("runtimes", "no runtime is installed; a device needs one", "pip install 'fanin[onnx]'")
    else:
        yield ok("runtimes", "none is installed; a coordinator needs none")


def gpu_finding() -> CheckResult:
    """Return the finding about GPUs. Devices train on the CPU; jobs of the datacenter use GPUs."""
    if shutil.which(NVIDIA_SMI[0]) is None:
        return ok("gpu", "none found (no nvidia-smi); fanin trains on the CPU")
    run = partial(subprocess.run, NVIDIA_SMI, capture_output=True, text=True, check=False, timeout=4.0)
    try:
        completed = within(run, late=None)
    except (OSError, subprocess.SubprocessError) as exc:
        completed = None
        reason = type(exc).__name__
    else:
        reason = "no answer"
    if completed is None or completed.returncode:
        reason = reason if completed is None else (completed.stderr or completed.stdout).strip()[:MAX_GPU_CHARS]
        return warn("gpu", f"nvidia-smi fails: {reason}", "reinstall the driver; see: dmesg | grep -i nvrm")
    return ok("gpu", "; ".join(completed.stdout.strip().splitlines())[:MAX_GPU_CHARS] or "none")


def _is_installed(record: RuntimeRecord) -> bool:
    return record.is_default and all(find_spec(library) is not None for library in record.libraries)


def _version(record: RuntimeRecord) -> str:
    """Return the version of a runtime's library, without an import of it."""
    names = packages_distributions().get(record.libraries[0], [])
    try:
        return version(names[0])
    except (IndexError, PackageNotFoundError):
        return "of unknown version"
