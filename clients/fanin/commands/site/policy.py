"""``fanin policy``: the privacy floor of a device, read and set by its owner. It needs the core install alone.

    fanin policy show --state DIR
    fanin policy set KEY=VALUE ... --state DIR

The device reads its policy for each Assignment, so it may run meanwhile.
"""

import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from fanin.clients.device.policy.owner import POLICY_FILE, SECTION, read_policy, write_policy
from fanin.clients.device.site.privacy import site_privacy
from fanin.commands.console.usage import Parser, check_target, wrong_usage
from fanin.edge.floors.floor import floor_keys
from fanin.edge.floors.rows import floor_row, parse_floor
from fanin.protos.errors import InvalidInput

KEYS_PAGE = "docs/howto/privacy-floor.md"


def main(argv: Sequence[str]) -> int:
    """Run ``fanin policy``."""
    options = _parser(takes_values=argv[:1] != ["show"]).parsed(argv)
    with wrong_usage():
        check_target("--json", options.json or "")
    folder = Path(options.state)
    if options.verb == "set":
        _set(folder, options.values)
    privacy = site_privacy(folder)
    if options.json is None:
        lines = [*privacy.floor_texts()]
        sys.stdout.write("\n".join(f"{'' if index else 'floor':7}{text}" for index, text in enumerate(lines)) + "\n")
        if options.verb == "set":
            sys.stdout.write("It holds from the next assignment on. A device that runs needs no restart.\n")
    else:
        document = privacy.document()
        row = {"file": str(folder / POLICY_FILE)} | {name: document[name] for name in ("floor", "floors", "problem")}
        text = json.dumps(row, indent=2) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text, "utf-8")
    return 1 if privacy.problem else 0


def _set(folder: Path, words: Sequence[str]) -> None:
    """Change keys of the policy. All of them are checked before the file is replaced."""
    with wrong_usage():
        changes = dict(map(_change, words))
    row = {**floor_row(read_policy(folder)), **changes}
    with wrong_usage():
        floor = parse_floor({name: value for name, value in row.items() if value != ""}, SECTION)
    write_policy(folder, floor)
    if not (folder / "device.key").exists():
        sys.stderr.write(
            f"note: no device has used {folder} yet (it has no device.key): the floor holds for a device that starts "
            f"with fanin join --state {folder}, and for no other folder\n"
        )


def _change(word: str) -> tuple[str, object]:
    """Return a key and its value: "" to remove the key. A value that is no number of TOML is a text."""
    name, equals, text = word.partition("=")
    if not equals or not name:
        raise InvalidInput(f"got {word!r}, expected KEY=VALUE as in min_survivors=20", code="FN-1701")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, LookupError, RecursionError):
        value = text
    return name.strip(), value if isinstance(value, int | float) and not isinstance(value, bool) else text.strip("\"'")


def _parser(*, takes_values: bool) -> Parser:
    parser = Parser(
        prog="fanin policy",
        description="Show or change the privacy floor of a device: the least privacy with which it takes part in a "
        "round. The owner of the device tightens the floor of a bundle's manifest, and never loosens it.",
        epilog=f"The keys are {', '.join(key.name for key in floor_keys())}; {KEYS_PAGE} describes them. "
        "Exit status: 0, 1 an error or a policy that cannot be read, 2 wrong usage.",
    )
    parser.add_argument("verb", choices=("show", "set"), help="show the floor in force, or set keys of the owner's")
    if takes_values:
        parser.add_argument(
            "values", nargs="+", metavar="KEY=VALUE", help="keys to set, as in min_survivors=20; KEY= removes a key"
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
