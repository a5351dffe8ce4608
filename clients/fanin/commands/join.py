"""``fanin join``: one device, on the core install and a runtime, without torch and onnx.

It uses argparse, because the core install has no typer.
"""

import argparse
import contextlib
import logging
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from fanin.clients.data.npz import open_npz
from fanin.clients.device.client import Client, ClientOptions, ClientParts
from fanin.clients.device.footprint import SparingTrainer, give_back, share_one_heap
from fanin.clients.device.serving import Serving
from fanin.clients.device.session.protocols import identity_of
from fanin.clients.device.session.tracing import DeviceTraces
from fanin.clients.device.site.attempt import JoinAttempt, noted_attempt
from fanin.clients.device.site.journal import Journal
from fanin.clients.device.site.record import SitePlace
from fanin.clients.device.storage.cache import DEFAULT_MAX_BYTES, Cache, hold_folder
from fanin.clients.device.training.resuming import DEFAULT_SAVE_S, SavePolicy
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.device.training.work import WorkLimit
from fanin.clients.device.updates import Trainer
from fanin.clients.pins import AUTHORITY_FILE, kept_authority, parse_fingerprint
from fanin.clients.route import route_to
from fanin.clients.textfiles import read_public_key, read_text, read_token
from fanin.clients.transport import Connection, GrpcTransport
from fanin.commands.console.streams import LogFormat, configure_logging
from fanin.commands.console.usage import Parser, wrong_usage
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import Runtime
from fanin.edge.scopes import LogScope, note_scope
from fanin.edge.spans import open_spans
from fanin.protos.addresses import check_remote, parse_page_address
from fanin.protos.calls import device_id_of
from fanin.protos.errors import InvalidInput

LOG = logging.getLogger("fanin.clients")
TOKEN_VARIABLE: Final = "FANIN_DEVICE_TOKEN"
MAX_APP_FAILURES: Final = 8
"""With the coordinator's growing pauses, the last failure comes after 5 minutes. A temporary cause has ended by that
time."""


def main(argv: Sequence[str]) -> int:
    """Run ``fanin join``."""
    options = _parser().parsed(argv)
    configure_logging(logging.WARNING if options.quiet else logging.INFO, LogFormat(options.log_format))
    share_one_heap()
    # Free the memory of the imports before the runtime starts, and below that of both before the connection opens.
    give_back()
    # Check runtime and data before the first call: a device without them cannot take part.
    with wrong_usage():
        _check_options(options)
    with noted_attempt(Path(options.state), _place(options)) as attempt, contextlib.ExitStack() as stack:
        trainer, runtime = _flower(options, stack) if options.flower else _graphs(options)
        return _join(options, trainer, runtime, attempt)


def _join(options: argparse.Namespace, trainer: Trainer, runtime: Runtime | None, attempt: JoinAttempt) -> int:
    publisher = read_public_key(Path(options.publisher))
    token = _token(options)
    # An authority of --ca is read before the folder is created. One by its fingerprint is kept in the folder.
    connection = Connection(options.server, read_text(Path(options.ca), "--ca").encode()) if options.ca else None
    with hold_folder(Path(options.state)):
        connection = connection or Connection(options.server, _pinned_authority(options, attempt))
        give_back()
        cache = Cache(Path(options.state), options.cache_mb << 20)
        # An owner who made a mistake in the policy should not wait for the first refusal to see it.
        cache.guard.owner()
        key = cache.key()
        device = device_id_of(key.public)
        note_scope(LogScope(device=device))
        transport = GrpcTransport(connection, key)
        place = replace(_place(options), runtime=trainer.runtime, publishers=(publisher,))
        spans = open_spans("fanin-device", options.traces)
        parts = ClientParts(
            transport=transport,
            cache=cache,
            trainer=trainer,
            trusted=(publisher,),
            rng=random.Random(),
            serving=Serving(runtime, cache, (publisher,)) if options.serve and runtime else None,
            traces=None if spans is None else DeviceTraces(spans, transport, device, time.time),
            journal=Journal(Path(options.state), place, device),
            identity=identity_of(key, certificate=cache.certificate()),
        )
        try:
            with _page(options):
                attempt.passed()
                _take_part(options, token, parts)
        finally:
            if spans is not None:
                spans.close()
        connection.close()
    return 0


def _token(options: argparse.Namespace) -> str:
    """Return the enrollment token; "" if none is given for a device that has a key, and so may have enrolled."""
    if (
        not options.token_file
        and not os.environ.get(TOKEN_VARIABLE, "").strip()
        and Cache.is_device(Path(options.state))
    ):
        return ""
    return read_token(Path(options.token_file) if options.token_file else None, TOKEN_VARIABLE)


def _place(options: argparse.Namespace) -> SitePlace:
    proxy = route_to(check_remote("--server", options.server), os.environ).proxy
    return SitePlace(
        server=options.server,
        proxy="" if proxy is None else str(proxy),
        ca_file=str(Path(options.ca or Path(options.state) / AUTHORITY_FILE).absolute()),
        ca_fingerprint=options.ca_fingerprint or "",
        token_file=str(Path(options.token_file).absolute()) if options.token_file else "",
        data=options.data or f"the app {options.flower}",
    )


@contextlib.contextmanager
def _page(options: argparse.Namespace) -> Iterator[None]:
    """Serve the page of the device, if --web names an address."""
    if options.web is None:
        yield
        return
    # Imported late: a device without the page would pay for the memory.
    from fanin.clients.device.site.page import serve_page

    with serve_page(Path(options.state), options.web) as url:
        LOG.info("page of this device: %s", url)
        yield


def _pinned_authority(options: argparse.Namespace, attempt: JoinAttempt) -> bytes:
    """Return the certificate of the coordinator's authority by its fingerprint."""
    with _ending_at_signals():
        return kept_authority(options.server, options.ca_fingerprint, Path(options.state), attempt.retry)


def _graphs(options: argparse.Namespace) -> tuple[Trainer, Runtime]:
    """Return the trainer of a device that runs graphs, and its runtime."""
    runtime = open_runtime(options.runtime)
    store = open_npz(Path(options.data), options.partition or 0, options.validation)
    policy, work = SavePolicy(save_s=options.save_s), WorkLimit(steps=options.max_steps, epochs=options.max_epochs)
    return SparingTrainer(RuntimeTrainer(runtime, store, policy=policy, work=work)), runtime


def _flower(options: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[Trainer, None]:
    """Return the trainer of a device that runs a Flower app. The app ends with ``stack``."""
    # Imported late: a device that runs graphs would pay for the memory.
    from fanin.clients.flower.process import FlowerProcess
    from fanin.clients.flower.states import FlowerStates
    from fanin.clients.flower.task import FlowerSettings
    from fanin.clients.flower.trainer import FlowerTrainer

    settings = FlowerSettings(
        app=options.flower,
        folder=Path.cwd(),
        partition=options.partition or 0,
        node_config=options.node_config,
        run_config=options.run_config,
    )
    process = stack.enter_context(FlowerProcess(settings))
    return FlowerTrainer(process, FlowerStates(Path(options.state) / "flower"), options.partition or 0), None


def _take_part(options: argparse.Namespace, token: str, parts: ClientParts) -> None:
    delay_seed = None if options.delay_seed is None else f"{options.delay_seed}/{options.partition or 0}"
    client = Client(
        parts,
        ClientOptions(
            token=token,
            max_updates=options.max_updates,
            max_failures=_max_failures(options),
            delay_seed=delay_seed,
            partition=_partition(options),
            shares_condition=not options.no_condition,
        ),
    )
    with _ending_at_signals():
        client.run()


@contextlib.contextmanager
def _ending_at_signals() -> Iterator[None]:
    """End the process with status 0 at SIGTERM, and at SIGHUP unless it was started with nohup.

    The state on disk is complete at any moment, so the process need not wait for the call in progress.
    """
    handlers = {
        number: signal.signal(number, lambda *_: sys.exit(0))
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _partition(options: argparse.Namespace) -> int | None:
    """Return the partition that the operator named, also for a Flower app alone; None without one."""
    named = re.search(r"(?:^|\s)partition-id=(\d+)(?:\s|$)", options.node_config)
    return int(named.group(1)) if named else options.partition


def _max_failures(options: argparse.Namespace) -> int:
    """Return the number of failed trainings in a row after which the device ends.

    An app belongs to the device, so it fails in every Run. Graphs come with a Run, and the next Run may have others.
    """
    if options.max_failures is None:
        return MAX_APP_FAILURES if options.flower else 0
    return int(options.max_failures)


def _parser() -> Parser:
    parser = Parser(
        prog="fanin join",
        description="Take part in federated training as one device: check in, train on local data, upload.",
        epilog="The folder --state holds the device's key, its downloads and its unfinished update. "
        "A device that is stopped at any moment resumes when it is started again.",
    )
    _add_coordinator(parser)
    parser.add_argument(
        "--data",
        metavar="FILE.npz",
        help="examples: an array for each input of the model, such as x, and y; required without --flower",
    )
    parser.add_argument(
        "--validation", type=float, default=0.2, metavar="SHARE", help="held out for validation (0.2); 0: none"
    )
    parser.add_argument(
        "--partition",
        type=int,
        metavar="N",
        help="index of this data in the population (0); the coordinator warns of two devices with one index",
    )
    parser.add_argument("--state", default="fanin-device", metavar="DIR", help="this device's folder (fanin-device)")
    parser.add_argument(
        "--runtime", metavar="NAME", help="runtime to train with (the first installed of onnx, litert, tflite)"
    )
    parser.add_argument(
        "--serve", action="store_true", help="keep the newest version ready as an int8 model, for fanin infer"
    )
    parser.add_argument(
        "--cache-mb", type=int, default=DEFAULT_MAX_BYTES >> 20, metavar="MB", help="disk space for downloads (256)"
    )
    parser.add_argument(
        "--web",
        metavar="[HOST:]PORT",
        help="serve a page with the state of this device, on this machine only; 0: any port",
    )
    parser.add_argument("--no-condition", action="store_true", help="do not report battery and network in check-ins")
    _add_flower(parser)
    parser.add_argument("--quiet", action="store_true", help="log warnings and errors only, not each step of a round")
    parser.add_argument("--max-updates", type=int, default=0, metavar="N", help="stop after N accepted updates")
    parser.add_argument(
        "--max-failures",
        type=int,
        metavar="N",
        help="end with an error after N failed trainings in a row, 0 for never "
        f"({MAX_APP_FAILURES} with --flower, else 0)",
    )
    parser.add_argument(
        "--delay-seed", type=int, metavar="SEED", help="seed of a random delay before each upload, to vary the order"
    )
    _add_training(parser)
    _add_telemetry(parser)
    return parser


def _add_coordinator(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the coordinator, and whom the device trusts."""
    parser.add_argument("--server", required=True, metavar="HOST:PORT", help="the coordinator")
    authority = parser.add_mutually_exclusive_group(required=True)
    authority.add_argument("--ca", metavar="FILE", help="certificate of the coordinator's authority")
    authority.add_argument(
        "--ca-fingerprint",
        metavar="SHA256",
        help="fingerprint of that certificate, which fanin serve prints: the device reads the certificate from the "
        "coordinator, checks it, and keeps it in --state",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="enrollment token; default: $FANIN_DEVICE_TOKEN; an enrolled device needs none",
    )
    parser.add_argument("--publisher", required=True, metavar="FILE", help="public key whose bundles are trusted")


def _add_telemetry(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-format",
        choices=[each.value for each in LogFormat],
        default=LogFormat.TEXT.value,
        help="the log on standard error: lines of text, or a JSON object a line",
    )
    parser.add_argument(
        "--traces",
        default="",
        metavar="URL",
        help="send spans to this collector by OTLP over gRPC, or over HTTP to port 4318; default: that of the OTEL_ "
        "variables, else none",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    """Add the options of the training: when it is saved, and how long it lasts."""
    parser.add_argument(
        "--save-s",
        type=float,
        default=DEFAULT_SAVE_S,
        metavar="SECONDS",
        help="save a training that was not saved for this long, at the end of the next epoch; a killed device resumes "
        f"from there ({DEFAULT_SAVE_S:g}); inf: never",
    )
    parser.add_argument(
        "--max-steps", type=int, metavar="N", help="most train steps in a round: the update is then partial work"
    )
    parser.add_argument(
        "--max-epochs", type=float, metavar="E", help="most epochs in a round, such as 0.5: likewise partial work"
    )


def _add_flower(parser: argparse.ArgumentParser) -> None:
    """Add the options of a device that runs a Flower app."""
    parser.add_argument(
        "--flower",
        metavar="MODULE:APP|FOLDER",
        help="train with this Flower app, a ClientApp or NumPyClient below the working directory, or with that of the "
        "project in a folder, instead of graphs",
    )
    parser.add_argument(
        "--node-config", default="", metavar="KEY=VALUE ...", help="its node_config, as in 'num-partitions=10'"
    )
    parser.add_argument(
        "--run-config", default="", metavar="KEY=VALUE ...", help="entries that replace those of its pyproject.toml"
    )


def _check_options(options: argparse.Namespace) -> None:
    """Raise InvalidInput for a value out of range, and for options that exclude each other."""
    check_remote("--server", options.server)
    if options.web is not None:
        options.web = parse_page_address("--web", options.web)
    if options.ca_fingerprint is not None:
        options.ca_fingerprint = parse_fingerprint("--ca-fingerprint", options.ca_fingerprint)
    # Raises InvalidInput for a limit out of its range.
    limit = WorkLimit(steps=options.max_steps, epochs=options.max_epochs)
    if options.flower and limit != WorkLimit():
        raise InvalidInput(
            "--flower: got it with --max-steps or --max-epochs, expected none of them: the app decides how long it "
            "trains; remove them",
            code="FN-0915",
        )
    if options.flower and (options.data or options.serve or options.runtime):
        raise InvalidInput(
            "--flower: got it with --data, --serve or --runtime, expected it alone: the app loads its own data, and "
            "its bundle has no graphs to serve",
            code="FN-0915",
        )
    if not options.flower and (options.node_config or options.run_config):
        raise InvalidInput(
            "--node-config, --run-config: got them without --flower, expected them for a Flower app only",
            code="FN-0914",
        )
    if not options.flower and not options.data:
        raise InvalidInput(
            "--data: got none, expected an .npz file of examples; name one, or an app with --flower", code="FN-0916"
        )
    if not 0.0 <= options.validation < 1.0:
        raise InvalidInput(
            f"--validation: got {options.validation:g}, expected a share of at least 0 and less than 1, as in 0.2",
            code="FN-1008",
        )
    if not options.save_s >= 0.0:
        raise InvalidInput(
            f"--save-s: got {options.save_s:g}, expected seconds of at least 0, or inf for never", code="FN-1008"
        )
    for option, least in (("partition", 0), ("cache_mb", 1), ("max_updates", 0), ("max_failures", 0)):
        value = getattr(options, option)
        if value is not None and value < least:
            raise InvalidInput(f"--{option.replace('_', '-')}: got {value}, expected at least {least}", code="FN-1008")
