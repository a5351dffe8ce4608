"""``fanin demo``: the whole loop on this machine, as a user would run it with the other commands.

``steps`` is the walk, ``processes`` the coordinator and the devices as processes of their own, ``measure`` what
the test digits say of a Version, ``report`` the table and the JSON. Stopping is decided on validation parts;
the test digits are looked at when everything is over.
"""

from collections.abc import Sequence

from fanin.commands.console.terminal import run_command
from fanin.commands.demo.steps import demo


def main(argv: Sequence[str]) -> int:
    """Run ``fanin demo``."""
    return run_command(demo, argv)
