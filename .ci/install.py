"""Install packages into an environment with uv, which takes a seventh of pip's time.

    .venv/bin/python .ci/install.py ENVIRONMENT ARGUMENT...

The arguments are those of ``pip install``. uv does not read pip's configuration, so the indexes, constraints,
certificate and proxy of pip are passed on. If uv fails, pip installs: a registry may need settings of pip that uv does
not have.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

SECTIONS = ("global", "install", ":env:")
"""Sections of pip's configuration. A later one takes precedence."""
OPTIONS = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
"""uv's option for a setting of pip. Each has one or more values, with spaces between them."""
VARIABLES = {
    "cert": ("SSL_CERT_FILE",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
}
"""The environment variables of uv for a setting of pip."""


def read_settings(lines: Iterable[str]) -> dict[str, str]:
    """Return the settings that ``pip config list`` prints as ``SECTION.NAME='VALUE'``."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in lines:
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in found:
            found[section][name] = str(ast.literal_eval(value))
    return {name: value for section in SECTIONS for name, value in found[section].items()}


def uv_options(settings: dict[str, str]) -> list[str]:
    """Return the options of uv for settings of pip."""
    options = [f"{option}={value}" for name, option in OPTIONS.items() for value in settings.get(name, "").split()]
    if settings.get("no-index") in {"1", "true"}:
        options.append("--no-index")
    # pip compares the versions of all indexes, and uv by default only those of the first index that has the package.
    return ["--index-strategy=unsafe-best-match", *options]


def uv_variables(settings: dict[str, str]) -> dict[str, str]:
    """Return the environment variables of uv for settings of pip."""
    return {variable: settings[name] for name, names in VARIABLES.items() if name in settings for variable in names}


def main(environment: str, *arguments: str) -> int:
    """Install, and return the exit status."""
    tools = Path(sys.executable).parent
    python = str(Path(environment) / "bin/python")
    listed = subprocess.run([tools / "pip", "config", "list"], check=True, capture_output=True, text=True)
    settings = read_settings(listed.stdout.splitlines())
    command = [tools / "uv", "pip", "install", "--quiet", "--python", python, *uv_options(settings), *arguments]
    if subprocess.run(command, env=os.environ | uv_variables(settings), check=False).returncode == 0:
        return 0
    print(f"{environment}: uv could not install; pip tries it", file=sys.stderr)
    command = [tools / "pip", "--python", python, "install", "--quiet", "--no-compile", *arguments]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
