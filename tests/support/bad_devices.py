"""Devices that do harm: one whose Updates are refused, one that never answers, one that dies. And healthy devices.

All take part over gRPC in a coordinator of another process, each on a thread of its own.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np

from fanin.clients.device.client import Client, ClientOptions, ClientParts
from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.device.models import OpenedModel
from fanin.clients.device.storage.cache import Cache
from fanin.clients.device.updates import Change
from fanin.clients.transport import Connection, GrpcTransport
from fanin.protos import messages as m
from fanin.protos.errors import FaninError
from fanin.simulation import SyntheticTrainer
from fanin.v1 import fleet_pb2 as pb
from support.processes import Site
from support.stranger import Stranger, update_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowTrainer:
    """A SyntheticTrainer that takes ``work_s`` seconds, and that stops for ever in the Round ``dies_in``."""

    partition: int
    work_s: float
    dies_in: int = 0
    is_dead: threading.Event = field(default_factory=threading.Event)
    runtime: str = "synthetic 1"
    graph_format: str = "onnx"

    def train(self, model: OpenedModel, assignment: m.Assignment, should_continue: ShouldContinue) -> Change:
        """Train, or die."""
        if self.dies_in and assignment.round >= self.dies_in:
            self.is_dead.set()
            while should_continue():
                time.sleep(0.02)
        until = time.monotonic() + self.work_s
        while time.monotonic() < until and should_continue():
            time.sleep(0.02)
        return SyntheticTrainer(partition=self.partition).train(model, assignment, should_continue)


@dataclass
class Group:
    """The devices of one coordinator."""

    site: Site
    publisher: str
    folder: Path
    num_refused: int = 0
    _closing: list[Callable[[], object]] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def healthy(self, index: int, work_s: float, dies_in: int = 0) -> None:
        """Add the production client. In the Round ``dies_in`` its process seems to be killed."""
        cache = Cache(self.folder / f"device-{index}")
        line = Connection(self.site.address, self.site.ca)
        trainer = SlowTrainer(partition=index, work_s=work_s, dies_in=dies_in)
        parts = ClientParts(
            transport=GrpcTransport(line, cache.key()),
            cache=cache,
            trainer=trainer,
            trusted=(self.publisher,),
            rng=random.Random(index),
        )
        client = Client(parts, ClientOptions(token=self.site.device_token))
        self._start(client.run)
        if dies_in:
            self._start(lambda: (trainer.is_dead.wait(), client.stop(), line.close()))
        self._closing += [client.stop, trainer.is_dead.set, line.close]

    def silent(self) -> None:
        """Add a device that takes every Assignment and never answers."""
        device = self._stranger()

        def run() -> None:
            while not self._is_over.is_set():
                device.check_in(5.0)
                self._is_over.wait(0.2)

        self._start(run)

    def refused(self) -> None:
        """Add a device whose Updates are for another Version. It repeats check-in and upload without a pause."""
        device = self._stranger()

        def run() -> None:
            while not self._is_over.is_set():
                work = device.check_in(5.0).assigned
                if not work.assignment_id:
                    continue
                model = device.fetch(work)
                header, payload = update_of(work, model, np.zeros(model.values.size, np.float32), 7)
                header.version_sha256 = "0" * 64
                try:
                    device.upload(header, payload)
                except grpc.RpcError as exc:
                    if self._is_over.is_set():
                        return
                    assert exc.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
                    self.num_refused += 1

        self._start(run)

    def stubborn(self) -> None:
        """Add a device that takes a place, and then repeats an upload without a header, without a pause or an end."""
        device = self._stranger()
        first = pb.UploadRequest(piece=pb.Piece(offset=0, data=b"no header"))

        def run() -> None:
            while not device.check_in(5.0).assigned.assignment_id:
                pass
            while not self._is_over.is_set():
                metadata = device.sign("Upload", first.SerializeToString())
                try:
                    list(device.fleet.Upload(iter([first]), metadata=metadata))
                except grpc.RpcError as exc:
                    if self._is_over.is_set():
                        return
                    assert exc.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
                    self.num_refused += 1

        self._start(run)

    def close(self) -> None:
        """Stop all devices."""
        self._is_over.set()
        for close in self._closing:
            close()
        for thread in self._threads:
            thread.join(30.0)

    def _stranger(self) -> Stranger:
        device = Stranger(self.site.address, self.site.ca, bytes.fromhex(self.publisher))
        device.enroll(self.site.device_token)
        self._closing.append(device.close)
        return device

    def _start(self, run: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                run()
            except (grpc.RpcError, FaninError, ValueError):
                # ValueError: gRPC's error for a call on a closed channel.
                if not self._is_over.is_set():
                    raise

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        self._threads.append(thread)
