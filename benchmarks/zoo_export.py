"""One export of ``zoo.py``, in a process of its own: its peak memory, with its fork, is that of the export.

    python zoo_export.py MODEL FOLDER FORMAT...

FOLDER has the state of the module (``zoo_eager.py``). It receives the Bundle, and ``export.json`` with the figures or
with the error. If a format fails, the Bundle has the others.
"""

import json
import logging
import resource
import sys
import time
from pathlib import Path
from typing import Final

import torch
from tree_memory import peak_memory
from zoo_models import app_of

from fanin.edge.bundles.keys import SigningKey
from fanin.edge.export import App, export

PUBLISHER: Final = SigningKey(bytes(range(32)))
NUM_STEPS: Final = 20
STATE, TRAIN_DATA, HELD_OUT_DATA, BUNDLE, ROW = "state.pt", "train.npz", "held-out.npz", "bundle", "export.json"
Row = dict[str, object]


def main() -> None:
    """Export one model."""
    name, place, *formats = sys.argv[1:]
    folder = Path(place)
    torch.set_num_threads(1)
    row = exported(app_of(name, folder / STATE), folder / BUNDLE, formats)
    (folder / ROW).write_text(json.dumps(row))


def exported(app: App, folder: Path, formats: list[str]) -> Row:
    """Export an App, in all formats if possible. Return the figures of the first export."""
    row: Row = {"parameters": sum(value.numel() for value in app.module.parameters() if value.requires_grad)}
    error = attempt(app, folder, formats, row)
    if error is None:
        return row
    row["error"] = error
    for each in formats if len(formats) > 1 else ():
        alone: Row = {}
        fault = attempt(app, folder, [each], alone)
        if fault is None:
            row |= {key: alone[key] for key in ("formats", "bundle_bytes")}
            break
        row[f"error_{each}"] = fault
    return row


def attempt(app: App, folder: Path, formats: list[str], row: Row) -> str | None:
    """Export an App and write the figures into ``row``. Return the error; None for success."""
    error = None
    with peak_memory() as peak_bytes:
        began_s, began_processor_s = time.monotonic(), processor_s()
        try:
            export(app, folder, PUBLISHER, formats)
        except Exception as exc:  # Of any kind: an error of a converter is a finding of the benchmark.
            logging.exception("%s", app.name)
            error = f"{type(exc).__name__}: {exc}"
        row["export_seconds"] = time.monotonic() - began_s
        row["export_processor_seconds"] = processor_s() - began_processor_s
        row["peak_memory_bytes"] = peak_bytes()
    row["formats"] = [] if error else formats
    row["bundle_bytes"] = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if not error else 0
    return error


def processor_s() -> float:
    """Return the processor seconds of this process and of its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
