"""A process whose threads check in. Each check-in is by another device, signed, over TLS.

    python -m fanin.commands.bench.harness.callers FOLDER OUT KIND NUM_THREADS FIRST STEP COUNT

KIND ``kept`` uses one connection a thread, ``new`` one a check-in. OUT receives JSON: [start, end, latencies].
The devices are the numbers FIRST, FIRST + STEP, ..., COUNT of them; each key is derived from its number.
"""

import hashlib
import json
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from fanin.clients.transport import Connection, GrpcTransport
from fanin.commands.bench.harness.crowd import CAPABILITIES
from fanin.commands.bench.harness.device import open_line
from fanin.edge.bundles.keys import SigningKey
from fanin.protos import messages as m
from fanin.protos.errors import Conflict


def key_of(number: int) -> SigningKey:
    """Return the key of a registered device."""
    return SigningKey(hashlib.sha256(f"fanin bench {number}".encode()).digest())


def check_in(line: Connection, key: SigningKey) -> None:
    """Check in once, without waiting for work. Raises Conflict for an answer other than Wait."""
    request = m.CheckIn(protocol=m.PROTOCOL, capabilities=CAPABILITIES, wait_s=0.0)
    answer = GrpcTransport(line, key).check_in(request)
    if not isinstance(answer, m.Wait):
        raise Conflict(f"check-in: got {answer}, expected to wait: the round's place is taken", code="FN-1045")


def kept(folder: Path, keys: Sequence[SigningKey], latencies_s: list[float]) -> None:
    """Check in with all keys on one connection."""
    with closing(open_line(folder)) as line:
        for key in keys:
            started_s = time.perf_counter()
            check_in(line, key)
            latencies_s.append(time.perf_counter() - started_s)


def new(folder: Path, keys: Sequence[SigningKey], latencies_s: list[float]) -> None:
    """Check in with each key on its own connection."""
    for key in keys:
        started_s = time.perf_counter()
        with closing(open_line(folder)) as line:
            check_in(line, key)
        latencies_s.append(time.perf_counter() - started_s)


def main(argv: Sequence[str]) -> int:
    """Run the process."""
    folder, out, work = Path(argv[0]), Path(argv[1]), {"kept": kept, "new": new}[argv[2]]
    num_threads, first, step, count = map(int, argv[3:])
    keys = [key_of(first + step * number) for number in range(count)]
    latencies_s: list[float] = []
    threads = [
        threading.Thread(target=work, args=(folder, keys[number::num_threads], latencies_s))
        for number in range(num_threads)
    ]
    # Wall time is comparable between the processes of this machine.
    began_s = time.time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(latencies_s) != count:
        raise Conflict(f"got {len(latencies_s)} answers, expected {count}; the errors are above", code="FN-1045")
    out.write_text(json.dumps([began_s, time.time(), latencies_s]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
