"""``fanin completion bash``: print a script for the user's shell, with the words in the help of each command."""

import io
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from difflib import get_close_matches
from typing import Final

from fanin.commands.console.usage import WrongUsage
from fanin.commands.shell.scripts import SCRIPTS
from fanin.commands.shell.words import KINDS, table_of

USAGE: Final = """usage: fanin completion SHELL

Print a script that completes subcommands, verbs, options and their values.

  bash  fanin completion bash > ~/.local/share/bash-completion/completions/fanin
  zsh   fanin completion zsh > FOLDER/_fanin, with FOLDER in $fpath
  fish  fanin completion fish > ~/.config/fish/completions/fanin.fish

Print it again after an upgrade. The script also completes the names of Runs
and devices of the coordinator that serves from --state on this machine.
"""


def print_script(argv: Sequence[str], summaries: dict[str, str], run: Callable[[Sequence[str]], int]) -> int:
    """Run ``fanin completion``.

    Args:
        argv: The words after it.
        summaries: What each subcommand does.
        run: Runs a command line of fanin.
    """
    if not argv or not {"-h", "--help"}.isdisjoint(argv):
        sys.stdout.write(USAGE)
        return 0
    if argv[0] in KINDS:
        # Imported here: it needs the extra of the server.
        from fanin.commands.shell.names import print_names

        print_names(argv[0], argv[1:])
        return 0
    if argv[1:] or argv[0] not in SCRIPTS:
        near = get_close_matches(argv[0], SCRIPTS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise WrongUsage(f"got {' '.join(argv)!r}, expected one of {', '.join(SCRIPTS)}{hint}")
    sys.stdout.write(SCRIPTS[argv[0]](table_of(summaries, lambda words: _help(words, run))))
    return 0


def _help(words: Sequence[str], run: Callable[[Sequence[str]], int]) -> str:
    """Return the help of a command, "" if it needs a missing extra."""
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(io.StringIO()), suppress(SystemExit):
        run([*words, "--help"])
    return text.getvalue()
