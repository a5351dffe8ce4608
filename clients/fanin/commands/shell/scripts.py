"""The completion script of each shell, from the subcommands and their options.

A script has all words in it. So completing starts no Python, and a new subcommand needs a new script.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

HELP: Final = "--help"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A subcommand that a shell completes.

    Attributes:
        summary: What it does.
        options: Its options, each with its explanation.
    """

    summary: str
    options: Mapping[str, str]


Table = Mapping[str, Completed]


def bash(table: Table) -> str:
    """Return the script of bash."""
    cases = "\n".join(f'        {name}) words="{" ".join(each.options)}" ;;' for name, each in table.items())
    return f"""# fanin completion bash
_fanin() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{" ".join(table)}"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
        # Without a dash, the shell completes files.
        case "$current" in -*) ;; *) words="" ;; esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _fanin fanin
"""


def zsh(table: Table) -> str:
    """Return the script of zsh."""
    names = "\n".join(f"        {_quoted(f'{name}:{each.summary}')}" for name, each in table.items())
    cases = "\n".join(
        f"        {name}) _arguments -S {_zsh_options(each)} '*:file:_files' ;;" for name, each in table.items()
    )
    return f"""#compdef fanin
# fanin completion zsh
_fanin() {{
    local -a commands
    commands=(
{names}
    )
    if (( CURRENT == 2 )); then
        _describe 'subcommand' commands
        return
    fi
    local name="$words[2]"
    shift words
    (( CURRENT-- ))
    case "$name" in
{cases}
    esac
}}
_fanin "$@"
"""


def fish(table: Table) -> str:
    """Return the script of fish."""
    lines = [
        "# fanin completion fish",
        # Not __fish_seen_subcommand_from, which any word satisfies: a Run may have the name of a subcommand.
        "function __fanin_runs",
        "    set -l words (commandline -opc)",
        "    test (count $words) -ge 2; and test $words[2] = $argv[1]",
        "end",
        "complete -c fanin -n __fish_use_subcommand -f",
    ]
    for name, each in table.items():
        lines.append(f"complete -c fanin -n __fish_use_subcommand -f -a {name} -d {_fish_quoted(each.summary)}")
        lines += [
            f"complete -c fanin -n '__fanin_runs {name}' -l {option.removeprefix('--')} -d {_fish_quoted(text)}"
            for option, text in each.options.items()
        ]
    return "\n".join(lines) + "\n"


SCRIPTS: Final[Mapping[str, Callable[[Table], str]]] = MappingProxyType({"bash": bash, "zsh": zsh, "fish": fish})


def _zsh_options(each: Completed) -> str:
    escaped = (
        (option, text.replace("[", "(").replace("]", ")").replace(":", ",")) for option, text in each.options.items()
    )
    return " ".join(_quoted(f"*{option}[{text}]") for option, text in escaped)


def _quoted(text: str) -> str:
    """Quote a word for zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def options_of(help_lines: Sequence[str]) -> dict[str, str]:
    """Return the options in the help of a command, each with the first line of its explanation."""
    options: dict[str, str] = {}
    newest: list[str] = []
    for line in help_lines:
        if line.startswith("  -"):
            head, _, text = line.strip().partition("  ")
            names = head.replace(",", " ").replace("/", " ").split()
            newest = [name for name in names if name.startswith("--")]
            options |= dict.fromkeys(newest, text.strip())
        elif newest and line.startswith(" " * 8):
            options |= {name: line.strip() for name in newest if not options[name]}
    return options | {HELP: "show the options"}
