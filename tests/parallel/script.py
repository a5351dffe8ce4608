"""Runs Python code as ``python -c`` does, in a process that has imported torch, the export and the server already.

    programs.script(code, *words, site=folder)

Tests of programs of the docs use it, and tests of distributions in a folder: an import takes longer than their work.
"""

import importlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final

HIDDEN_WARNINGS: Final = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
"""Warnings that Python prints for code of ``__main__`` alone, or not at all."""


def main(arguments: Sequence[str]) -> int:
    """Run the code of a request in a folder, with its output in two files, and return its status."""
    folder, text = arguments
    request = json.loads(text)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(request["out"], name), os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    sys.argv[:] = ["-c", *request["words"]]
    # As Python's own path: the current folder, then the folder of the site.
    sys.path[:0] = ["", *filter(None, [request["site"]])]
    importlib.invalidate_caches()
    for category in HIDDEN_WARNINGS:
        warnings.simplefilter("ignore", category)
    try:
        exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as exc:
        if isinstance(exc.code, str):
            sys.stderr.write(f"{exc.code}\n")
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    return 0
