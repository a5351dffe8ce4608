"""``fanin serve``: a coordinator in one process, with all its state in one folder.

The first start creates a local certificate authority, an enrollment token for devices and a token for the operator.
The coordinator never serves without TLS and these tokens.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fanin.clients.device.footprint import share_one_heap
from fanin.commands.console.streams import LogFile, LogFormat, configure_logging
from fanin.commands.console.terminal import (
    DEFAULT_STATE,
    run_command,
)
from fanin.commands.console.usage import data_sets, wrong_usage
from fanin.commands.serve.coordinator import Composition, run_coordinator
from fanin.commands.settings import configured, show_config
from fanin.edge.spans import open_spans
from fanin.protos.errors import InvalidInput
from fanin.protos.plans import RetentionPlan
from fanin.protos.plans.retention import check_needed
from fanin.server.rounds.worker import LogObserver
from fanin.server.settings import Settings
from fanin.server.storage.disk import Durability
from fanin.server.strategies.process import checked_strategies

LOG = logging.getLogger("fanin.commands.serve")
CONFIG_FILE = "FANIN_SERVE_CONFIG"


def main(argv: Sequence[str]) -> int:
    """Run ``fanin serve``."""
    return run_command(serve, argv, defaults=lambda command, words: configured(command, words).defaults)


def config(argv: Sequence[str]) -> int:
    """Run ``fanin config``."""
    return show_config(serve, argv)


def serve(
    state: Annotated[Path, typer.Option("--state", help="Folder of the coordinator's state.")] = DEFAULT_STATE,
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT; port 0 selects a free port.")] = "127.0.0.1:7443",
    name: Annotated[
        list[str] | None, typer.Option("--name", help="Another host name or address of this coordinator; repeatable.")
    ] = None,
    durability: Annotated[
        Durability,
        typer.Option(
            "--durability", help="Whether an accepted update survives a crash of the process, or also of the host."
        ),
    ] = Durability.HOST,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="NAME=PATH",
            help="An .npz file on which Plans may let versions be evaluated; repeatable.",
        ),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            help="MODULE:NAME of a Flower strategy that Plans may run in a process here, besides those of flwr, "
            "imported from the working directory; repeatable.",
        ),
    ] = None,
    web: Annotated[
        str | None,
        typer.Option(
            "--web",
            help="HOST:PORT of the page for browsers; port 0 selects a free port. Default: 127.0.0.1:7480, or a free "
            "port if that one is in use.",
        ),
    ] = None,
    no_web: Annotated[bool, typer.Option("--no-web", help="Serve no page.")] = False,
    traces: Annotated[
        str,
        typer.Option(
            "--traces",
            metavar="URL",
            help="Send a trace of each Round to this collector by OTLP over gRPC, or over HTTP to port 4318. Default: "
            "that of the OTEL_ variables, else none.",
        ),
    ] = "",
    log_format: Annotated[
        LogFormat,
        typer.Option("--log-format", help="The log on standard error: lines of text, or a JSON object a line."),
    ] = LogFormat.TEXT,
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", help="PEM file with a certificate of your own authority, and its chain."),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="PEM file with the key of --tls-cert.")] = None,
    keep_versions: Annotated[
        int | None, typer.Option("--keep-versions", help="[retention] keep_versions of runs whose plan has none.")
    ] = None,
    keep_updates: Annotated[
        int | None, typer.Option("--keep-updates", help="[retention] keep_updates of runs whose plan has none.")
    ] = None,
    keep_days: Annotated[
        float | None, typer.Option("--keep-days", help="[retention] keep_days of runs whose plan has none.")
    ] = None,
    log_file: Annotated[
        Path | None, typer.Option("--log-file", help="Log to this file instead of to standard error.")
    ] = None,
    log_max_mb: Annotated[
        int, typer.Option("--log-max-mb", min=0, help="Size at which the next log file begins; 0: never.")
    ] = 100,
    log_keep: Annotated[int, typer.Option("--log-keep", min=1, help="Older log files that stay.")] = 9,
    verbose: Annotated[bool, typer.Option("--verbose/--no-verbose", help="Log every effect.")] = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="fanin.toml with values of these options.", envvar=CONFIG_FILE),
    ] = None,
) -> None:
    """Run a coordinator: serve devices and operators until SIGTERM."""
    with wrong_usage():
        handler = None if log_file is None else open_log(log_file, log_max_mb, log_keep)
    configure_logging(logging.DEBUG if verbose else logging.INFO, log_format, handler)
    if not verbose:
        # alembic logs at INFO that the tables are up to date.
        logging.getLogger("alembic").setLevel(logging.WARNING)
    if config is not None:
        LOG.info("configuration: %s", config)
    with wrong_usage():
        sets = data_sets(data or ())
        strategies = checked_strategies(strategy or ())
        retention = RetentionPlan(keep_versions=keep_versions, keep_updates=keep_updates, keep_days=keep_days)
        check_needed(retention, 0)
        settings = Settings(
            state=state,
            listen=listen,
            names=tuple(name or ()),
            durability=durability,
            web=web,
            has_page=not no_web,
        )
        settings = replace(settings, tls_cert=tls_cert, tls_key=tls_key)
    settings = replace(settings, data=sets, strategies=strategies, retention=retention)
    # Otherwise each thread that handles a Chunk keeps its own arena: several times the size of a large model.
    share_one_heap()
    spans = open_spans("fanin-coordinator", traces)
    try:
        asyncio.run(run_coordinator(settings, LogObserver(), Composition(spans=spans)))
    finally:
        if spans is not None:
            spans.close()


def open_log(path: Path, max_mb: int, num_old: int) -> logging.Handler:
    """Open a log file. Raises InvalidInput if it cannot be written."""
    try:
        return LogFile(path, max_mb * 1_000_000, num_old)
    except OSError as exc:
        raise InvalidInput(
            f"--log-file {path}: cannot be written ({exc.strerror}); give a file in a folder that exists",
            code="FN-1450",
        ) from exc
