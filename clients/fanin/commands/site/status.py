"""``fanin status``: the state of a device, from its folder. It needs no token, and the device may be stopped."""

import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fanin.clients.device.site.view import SiteState, site_view
from fanin.commands.console.usage import Parser, check_target, wrong_usage
from fanin.protos.addresses import Address, parse_page_address
from fanin.protos.errors import InvalidInput

NOT_CONNECTED: Final = 3
"""Exit status for a device that is not connected or is stopped, as systemctl has it."""


def main(argv: Sequence[str]) -> int:
    """Run ``fanin status``."""
    options = _parser().parsed(argv)
    with wrong_usage():
        check_target("--json", options.json or "")
        address = None if options.web is None else parse_page_address("--web", options.web)
        if address is not None and options.json is not None:
            raise InvalidInput("--web: got --json too, expected one of them", code="FN-1003")
    view = site_view(Path(options.state), time.time())
    if address is not None:
        _serve(Path(options.state), address)
    if options.json is None:
        sys.stdout.write(view.text())
    else:
        text = json.dumps(view.document(), indent=2) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text, "utf-8")
    return 0 if view.state is SiteState.CONNECTED else NOT_CONNECTED


def _serve(folder: Path, address: Address) -> None:
    """Serve the page of the device until an interrupt, also after the device has ended."""
    # Imported here: the state as text needs no server.
    from fanin.clients.device.site.page import serve_page

    with serve_page(folder, address) as url:
        sys.stdout.write(f"page of this device: {url}\n")
        sys.stdout.flush()
        threading.Event().wait()


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
    parser.add_argument(
        "--web",
        metavar="[HOST:]PORT",
        help="serve the state as a page on this machine until Ctrl-C, also while the device is stopped; 0: any port",
    )
    return parser
