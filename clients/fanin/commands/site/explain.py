"""``fanin explain``: what a code of an error means. It runs on the core install: errors of a device name it."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fanin.commands.console.usage import Parser, check_target, wrong_usage
from fanin.protos.codes import explained


def main(argv: Sequence[str]) -> int:
    """Run ``fanin explain``."""
    options = _parser().parsed(argv)
    with wrong_usage():
        check_target("--json", options.json or "")
    entry = explained(options.code)
    if options.json is None:
        sys.stdout.write(f"{entry.meaning}\n\nCause: {entry.cause}\n\nRemedy: {entry.remedy}\n")
        return 0
    text = json.dumps(asdict(entry), indent=2) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    else:
        Path(options.json).write_text(text, "utf-8")
    return 0


def _parser() -> Parser:
    parser = Parser(prog="fanin explain", description="Show meaning, cause and remedy of an error by its code.")
    parser.add_argument("code", metavar="CODE", help="the code of an error, such as FN-0201")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON: to standard output instead of the text, or to FILE"
    )
    return parser
