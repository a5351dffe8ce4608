"""``fanin completion bash``: print a script for the user's shell, with the options in the help of each command."""

import io
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from difflib import get_close_matches
from typing import Final

from fanin.commands.console.usage import WrongUsage
from fanin.commands.shell.scripts import SCRIPTS, Completed, options_of

USAGE: Final = """usage: fanin completion bash|zsh|fish

Print a script that completes subcommands and options.

  bash: fanin completion bash > ~/.local/share/bash-completion/completions/fanin
  zsh:  fanin completion zsh > FOLDER/_fanin, with FOLDER in $fpath
  fish: fanin completion fish > ~/.config/fish/completions/fanin.fish

Print it again after an upgrade.
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
    if argv[1:] or argv[0] not in SCRIPTS:
        near = get_close_matches(argv[0], SCRIPTS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise WrongUsage(f"got {' '.join(argv)!r}, expected one of {', '.join(SCRIPTS)}{hint}")
    table = {name: Completed(summary=summary, options=_options(name, run)) for name, summary in summaries.items()}
    sys.stdout.write(SCRIPTS[argv[0]](table))
    return 0


def _options(name: str, run: Callable[[Sequence[str]], int]) -> dict[str, str]:
    """Return the options of a subcommand. One that needs a missing extra has only ``--help``."""
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(io.StringIO()), suppress(SystemExit):
        run([name, "--help"])
    return options_of(text.getvalue().splitlines())
