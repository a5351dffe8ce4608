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
from fanin.clients.device.storage.cache import Cache, hold_folder
from fanin.clients.device.training.resuming import SavePolicy
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.device.training.tuner import tuner_of
from fanin.clients.device.training.work import WorkLimit
from fanin.clients.device.updates import Trainer
from fanin.clients.pins import AUTHORITY_FILE, kept_authority
from fanin.clients.route import route_to
from fanin.clients.textfiles import read_public_key, read_text, read_token
from fanin.clients.transport import Connection, GrpcTransport
from fanin.commands.console.streams import LogFormat, configure_logging
from fanin.commands.console.usage import wrong_usage
from fanin.commands.site.options import MAX_APP_FAILURES, check_join, fine_tuning_of, join_parser
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import Runtime
from fanin.edge.scopes import LogScope, note_scope
from fanin.edge.spans import open_spans
from fanin.protos.addresses import check_remote
from fanin.protos.calls import device_id_of

LOG = logging.getLogger("fanin.clients")
TOKEN_VARIABLE: Final = "FANIN_DEVICE_TOKEN"


def main(argv: Sequence[str]) -> int:
    """Run ``fanin join``."""
    options = join_parser().parsed(argv)
    configure_logging(logging.WARNING if options.quiet else logging.INFO, LogFormat(options.log_format))
    share_one_heap()
    # Free the memory of the imports before the runtime starts, and below that of both before the connection opens.
    give_back()
    # Check runtime and data before the first call: a device without them cannot take part.
    with wrong_usage():
        check_join(options)
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
        serving = Serving(runtime, cache, (publisher,)) if options.serve and runtime else None
        spans = open_spans("fanin-device", options.traces)
        parts = ClientParts(
            transport=transport,
            cache=cache,
            trainer=trainer,
            trusted=(publisher,),
            rng=random.Random(),
            serving=serving,
            tuner=tuner_of(fine_tuning_of(options), cache, serving, trainer),
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
