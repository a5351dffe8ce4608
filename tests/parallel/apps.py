"""Apps that go wrong, for the tests of the launcher; ``FANIN_TEST_FOLDER`` says where they leave word."""

import os
import time
from pathlib import Path
from typing import NoReturn

from fanin.datacenter.models.digits_app import app
from fanin.edge.export.app import App


def crashing() -> App:
    """Fails on rank 1 with an error of the App's own; rank 0 waits for it in a collective."""
    if os.environ["RANK"] == "1":
        raise ArithmeticError("the App broke on rank 1")
    return app()


def killed() -> App:
    """Rank 1 is gone without a word."""
    if os.environ["RANK"] == "1":
        os._exit(77)
    return app()


def sleeping() -> NoReturn:
    """Leaves the process ids of rank and agent, then waits."""
    draft = Path(os.environ["FANIN_TEST_FOLDER"]) / f"draft-{os.environ['RANK']}"
    draft.write_text(f"{os.getpid()} {os.getppid()}")
    draft.rename(draft.with_name(f"pids-{os.environ['RANK']}"))
    while True:
        time.sleep(1.0)
