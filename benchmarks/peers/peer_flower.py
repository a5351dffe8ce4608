"""The same work on Flower: a SuperLink, one SuperNode a client and one run, over TLS, in the default isolation."""

import json
import os
import subprocess
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from work import Work, free_ports, seconds_between

from fanin.server.access.authority import local_identity

APP: Final = Path(__file__).parent / "flower_app"
START_S: Final = 60.0
ROUND_S: Final = 120.0
END_S: Final = 10.0


def flower_seconds(bin_folder: Path, folder: Path, work: Work) -> list[float]:
    """Return the seconds of each round but the first. Raises RuntimeError with Flower's output if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    identity = local_identity(folder / "tls", ("localhost", "127.0.0.1"), datetime.now(UTC))
    (folder / "server.pem").write_bytes(identity.certificate)
    key = folder / "server.key"
    key.touch(mode=0o600)
    key.write_bytes(identity.key)
    (folder / "ca.pem").write_bytes(identity.ca_certificate)
    (port, *node_ports), out = free_ports(work.num_clients + 1), folder / "rounds.json"
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{folder / "ca.pem"}"\n'
    )
    with ExitStack() as stack:
        tls = ["--ssl-certfile", str(folder / "server.pem"), "--ssl-keyfile", str(key)]
        tls += ["--ssl-ca-certfile", str(folder / "ca.pem")]
        words = [str(bin_folder / "flower-superlink"), "--port", str(port), *tls]
        words += ["--disable-runtime-dependency-installation"]
        started = {"superlink": _start(stack, folder, "superlink", words, bin_folder)}
        _wait_for(folder / "superlink.log", "Uvicorn running", START_S)
        for index, node_port in enumerate(node_ports):
            words = [str(bin_folder / "flower-supernode"), "--superlink", f"127.0.0.1:{port}"]
            words += ["--root-certificates", str(folder / "ca.pem"), "--port", str(node_port), *tls]
            started[f"supernode-{index}"] = _start(stack, folder, f"supernode-{index}", words, bin_folder)
        config = f'clients={work.num_clients} values={work.num_values} rounds={work.num_rounds + 1} out="{out}"'
        words = [str(bin_folder / "flwr"), "run", str(APP), "here", "--run-config", config]
        completed = subprocess.run(
            words, capture_output=True, text=True, check=False, env=_environment(folder, bin_folder)
        )
        if completed.returncode:
            raise RuntimeError(f"flwr run: {completed.stdout}{completed.stderr}")
        until = time.monotonic() + START_S + ROUND_S * (work.num_rounds + 1)
        while not out.exists():
            # Flower waits forever for a node that is missing.
            for name, process in started.items():
                if process.poll() is not None:
                    raise RuntimeError(f"flower: {name} ended: {(folder / f'{name}.log').read_text()[-2000:]}")
            if time.monotonic() > until:
                raise RuntimeError(f"flower: no result; {(folder / 'superlink.log').read_text()[-2000:]}")
            time.sleep(0.2)
        time.sleep(0.2)
        return seconds_between(json.loads(out.read_text()))


def _environment(folder: Path, bin_folder: Path) -> dict[str, str]:
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    # Telemetry would wait for a network, which may be missing.
    return {**os.environ, "PATH": path, "FLWR_HOME": str(folder), "FLWR_TELEMETRY_ENABLED": "0"}


def _start(stack: ExitStack, folder: Path, name: str, words: list[str], bin_folder: Path) -> "subprocess.Popen[bytes]":
    log = stack.enter_context((folder / f"{name}.log").open("wb"))
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(folder, bin_folder)
    )

    def end() -> None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)
    return process


def _wait_for(log: Path, text: str, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while text not in log.read_text(errors="replace"):
        if time.monotonic() > until:
            raise RuntimeError(f"{log}: got no {text!r} within {timeout_s:g} s: {log.read_text()[-2000:]}")
        time.sleep(0.2)
