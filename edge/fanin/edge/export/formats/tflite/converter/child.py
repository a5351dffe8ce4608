"""The converter's second layout strategy, in a separate process.

This strategy may end its process (a failed check in native code). The process of the export survives and reports one
error. Both processes share a folder::

    signatures.json   the names of the Signatures, in order
    INDEX.pt2         the program of the Signature with this index (torch.export.save)
    INDEX.pt          its example inputs (torch.save)
    model.tflite      the result, or
    error.txt         one line: why the converter rejected the graph
"""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from fanin.edge.export.formats.tflite.converter.convert import convert
from fanin.edge.export.graph.traced import Traced
from fanin.edge.export.refusals import Unconverted, first_line

PARTITIONER: Final = "DEFAULT"
# -P: a file in the current folder must not hide a library.
COMMAND: Final = (sys.executable, "-P", "-m", "fanin.edge.export.formats.tflite.converter.child")
SIGNATURES: Final = "signatures.json"
RESULT: Final = "model.tflite"
ERROR: Final = "error.txt"


def convert_in_child(signatures: Mapping[str, Traced], what: str, command: Sequence[str] = COMMAND) -> bytes:
    """Return a file with these Signatures.

    Args:
        signatures: Traced graphs by Signature name.
        what: Prefix of error messages.
        command: The converting program. The folder is appended as its last argument.

    Raises:
        UnsupportedModel: The converter rejects the graphs, or its process ends.
    """
    with tempfile.TemporaryDirectory(prefix="fanin-tflite-") as name:
        folder = Path(name)
        _save(signatures, folder)
        completed = subprocess.run(
            [*command, name], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if completed.returncode == 0 and (folder / RESULT).exists():
            return (folder / RESULT).read_bytes()
        reason = (folder / ERROR).read_text(encoding="utf-8") if (folder / ERROR).exists() else _reason(completed)
        raise Unconverted(f"{what}: cannot be converted to TFLite ({reason})", code="FN-0784")


def _reason(completed: subprocess.CompletedProcess[str]) -> str:
    lines = completed.stderr.split("\n") if completed.stderr else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    if completed.returncode < 0:
        return f"signal {signal.Signals(-completed.returncode).name} ended the converter: {last}"
    return f"the converter ended with status {completed.returncode}: {last}"


def _save(signatures: Mapping[str, Traced], folder: Path) -> None:
    (folder / SIGNATURES).write_text(json.dumps(list(signatures)), encoding="utf-8")
    for index, traced in enumerate(signatures.values()):
        torch.export.save(traced.program, folder / f"{index}.pt2")
        torch.save(list(traced.examples), folder / f"{index}.pt")


def _load(folder: Path) -> dict[str, Traced]:
    names = json.loads((folder / SIGNATURES).read_text(encoding="utf-8"))
    return {
        name: Traced(
            program=torch.export.load(folder / f"{index}.pt2"),
            examples=torch.load(folder / f"{index}.pt", weights_only=True),
            # The converter uses positions. The ports get their names in the finished file.
            inputs=(),
            outputs=(),
        )
        for index, name in enumerate(names)
    }


def main(folder: Path) -> None:
    """Convert the Signatures of a folder. Raises any error of the converter after writing its reason to the folder."""
    try:
        (folder / RESULT).write_bytes(convert(_load(folder), PARTITIONER))
    except Exception as exc:  # the converter raises any error of its four compilers
        (folder / ERROR).write_text(first_line(exc), encoding="utf-8")
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
