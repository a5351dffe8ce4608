"""``fanin status``: the state of a device, from its folder. It needs no token, and the device may be stopped."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fanin.clients.device.site.view import SiteState, site_view
from fanin.commands.console.usage import Parser, check_target, wrong_usage

NOT_CONNECTED: Final = 3
"""Exit status for a device that is not connected or is stopped, as systemctl has it."""


def main(argv: Sequence[str]) -> int:
    """Run ``fanin status``."""
    options = _parser().parsed(argv)
    with wrong_usage():
        check_target("--json", options.json or "")
    view = site_view(Path(options.state), time.time())
    if options.json is None:
        sys.stdout.write(view.text())
    else:
        text = json.dumps(view.document(), indent=2) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text, "utf-8")
    return 0 if view.state is SiteState.CONNECTED else NOT_CONNECTED


def _parser() -> Parser:
    parser = Parser(
        prog="fanin status",
        description="Show the state of a device: whether it is connected and why not, what runs, what it sent, its "
        "last errors, and what never leaves this machine.",
        epilog=f"Exit status: 0 connected, {NOT_CONNECTED} not connected or stopped, 1 an error, 2 wrong usage.",
    )
    parser.add_argument(
        "--state",
        default="fanin-device",
        metavar="DIR",
        help="the device's folder, of fanin join --state (fanin-device)",
    )
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON: to standard output instead of the text, or to FILE"
    )
    return parser
