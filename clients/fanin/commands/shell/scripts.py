"""The completion script of each shell, from the subcommands, their verbs and their options.

A script has all words in it, so completing them starts no Python, and a new subcommand needs a new script. Only the
names of Runs and devices are read when the user presses Tab, by ``fanin completion runs`` and ``devices``.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from fanin.commands.shell.words import Completed, Option, Table, subcommands, verbs_of

STATE: Final = "fanin-state"
"""The default of ``--state``, in the working folder of the shell."""


def bash(table: Table) -> str:
    """Return the script of bash."""
    verbs = "\n".join(
        f'        "{name}") words="{" ".join(verbs_of(table, name))}" ;;'
        for name in subcommands(table)
        if verbs_of(table, name)
    )
    values = "\n".join(
        f'        "{path} {option}") words="{" ".join(each.values)}"; is_value=1 ;;'
        for path, completed in table.items()
        for option, each in completed.options.items()
        if each.values
    )
    options = "\n".join(f'        "{path}") words="{" ".join(each.options)}" ;;' for path, each in table.items())
    names = "\n".join(f'        "{path}") kind={each.names} ;;' for path, each in table.items() if each.names)
    return f"""# fanin completion bash
_fanin_names() {{
    local index state={STATE}
    for ((index = 1; index < COMP_CWORD; index++)); do
        [ "${{COMP_WORDS[index]}}" = --state ] && state="${{COMP_WORDS[index + 1]}}"
    done
    "${{COMP_WORDS[0]}}" completion "$1" --state "$state" 2> /dev/null
}}
_fanin() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD - 1]}}"
    local path="${{COMP_WORDS[1]}}" words="" kind="" verbs="" is_value=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{" ".join(subcommands(table))}" -- "$current"))
        return
    fi
    case "$path" in
{verbs}
    esac
    verbs="$words"
    if [ -n "$verbs" ] && [ "$COMP_CWORD" -gt 2 ]; then
        path="$path ${{COMP_WORDS[2]}}"
        words="" verbs=""
    fi
    case "$path $previous" in
{values}
    esac
    case "$current" in
    -*)
        case "$path" in
{options}
        esac
        ;;
    *)
        # Without a dash, the shell completes files, also as the value of an option.
        if [ -z "$verbs$is_value" ]; then
            case "$path" in
{names}
            esac
            case "$previous" in -*) ;; *) [ -n "$kind" ] && words="$(_fanin_names "$kind")" ;; esac
        fi
        ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _fanin fanin
"""


def zsh(table: Table) -> str:
    """Return the script of zsh."""
    cases = []
    for name in subcommands(table):
        verbs = verbs_of(table, name)
        cases.append(f"        {name})\n{_zsh_verbs(table, name, verbs) if verbs else _zsh_arguments(table[name])} ;;")
    newline = "\n"
    return f"""#compdef fanin
# fanin completion zsh
_fanin_names() {{
    local state="${{opt_args[--state]:-{STATE}}}"
    # _arguments puts options of compadd before the kind.
    compadd "${{@[1,-2]}}" -- ${{(f)"$($fanin completion $argv[-1] --state "${{(Q)state}}" 2> /dev/null)"}}
}}
_fanin() {{
    local fanin="$words[1]" name="$words[2]" verb
    local -A opt_args
    local -a commands
    if (( CURRENT == 2 )); then
        commands=({_zsh_rows(table, {name: name for name in subcommands(table)})})
        _describe 'subcommand' commands
        return
    fi
    shift words
    (( CURRENT-- ))
    case "$name" in
{newline.join(cases)}
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
        "    for word in $argv",
        "        set -e words[1]",
        '        test "$words[1]" = $word; or return 1',
        "    end",
        "end",
        "function __fanin_at",
        "    test (count (commandline -opc)) -eq 2; and __fanin_runs $argv",
        "end",
        "function __fanin_names",
        "    set -l words (commandline -opc)",
        f"    set -l state {STATE}",
        "    if set -l index (contains -i -- --state $words)",
        "        set state $words[(math $index + 1)]",
        "    end",
        "    $words[1] completion $argv[1] --state $state 2> /dev/null",
        "end",
        "complete -c fanin -n __fish_use_subcommand -f",
    ]
    for path, each in table.items():
        name, _, verb = path.partition(" ")
        condition = f"'__fanin_at {name}'" if verb else "__fish_use_subcommand"
        lines.append(f"complete -c fanin -n {condition} -f -a {verb or name} -d {_fish_quoted(each.summary)}")
        if each.names:
            lines.append(f"complete -c fanin -n '__fanin_runs {path}' -f -a '(__fanin_names {each.names})'")
        elif verbs_of(table, path):
            lines.append(f"complete -c fanin -n '__fanin_at {path}' -f")
        lines += [
            f"complete -c fanin -n '__fanin_runs {path}' -l {option.removeprefix('--')}{_fish_value(described)} "
            f"-d {_fish_quoted(described.text)}"
            for option, described in each.options.items()
        ]
    return "\n".join(lines) + "\n"


SCRIPTS: Final[Mapping[str, Callable[[Table], str]]] = MappingProxyType({"bash": bash, "zsh": zsh, "fish": fish})


def _zsh_verbs(table: Table, name: str, verbs: Mapping[str, str]) -> str:
    cases = "\n".join(f"        {verb}) {_zsh_arguments(table[path]).strip()} ;;" for verb, path in verbs.items())
    return f"""        if (( CURRENT == 2 )); then
            commands=({_zsh_rows(table, verbs)})
            _describe 'verb' commands
            return
        fi
        verb="$words[2]"
        shift words
        (( CURRENT-- ))
        case "$verb" in
{cases}
        esac"""


def _zsh_rows(table: Table, paths: Mapping[str, str]) -> str:
    return " ".join(_quoted(f"{word}:{table[path].summary}") for word, path in paths.items())


def _zsh_arguments(each: Completed) -> str:
    options = " ".join(
        _quoted(f"*{name}[{_zsh_text(option.text)}]{_zsh_value(option)}") for name, option in each.options.items()
    )
    rest = f"*:name:_fanin_names {each.names}" if each.names else "*:file:_files"
    return f"        _arguments -S {options} {_quoted(rest)}"


def _zsh_text(text: str) -> str:
    return text.replace("[", "(").replace("]", ")").replace(":", ",")


def _zsh_value(option: Option) -> str:
    if option.values:
        return f":value:({' '.join(option.values)})"
    return ":value:_files" if option.has_value else ""


def _fish_value(option: Option) -> str:
    if option.values:
        return f" -x -a '{' '.join(option.values)}'"
    return " -r -F" if option.has_value else ""


def _quoted(text: str) -> str:
    """Quote a word for zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
