"""``fanin demo``: the complete loop on this machine, as a user would run it with the other commands.

Validation parts decide when to stop. The test digits are used only at the end.

Reading order:

- ``options``: the options of the command
- ``steps``: the steps of the demo, in order
- ``tasks``: the data sets with their settings
- ``processes``: the coordinator and the devices, each in its own process
- ``shown``: what is shown while they run
- ``report``: the table and the JSON
"""

from collections.abc import Sequence

from fanin.commands.console.terminal import run_command
from fanin.commands.demo.options import demo


def main(argv: Sequence[str]) -> int:
    """Run ``fanin demo``."""
    return run_command(demo, argv)
