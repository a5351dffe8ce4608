"""A device inside an app: ``join`` runs a client on its own thread.

    with join(settings, store, may_work=is_idle_and_charged) as client:
        client.predict({"x": x})

The client has the same parts as that of ``fanin join --serve``. Build a ``Client`` yourself to choose other parts.
"""

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fanin.clients.data.stores import ExampleStore
from fanin.clients.device.client import Client, ClientOptions, ClientParts
from fanin.clients.device.serving import Serving
from fanin.clients.device.session.protocols import identity_of
from fanin.clients.device.site.journal import Journal
from fanin.clients.device.site.record import SitePlace
from fanin.clients.device.storage.cache import DEFAULT_MAX_BYTES, Cache, hold_folder
from fanin.clients.device.training.resuming import DEFAULT_SAVE_S, SavePolicy
from fanin.clients.device.training.trainer import RuntimeTrainer
from fanin.clients.device.training.tuner import tuner_of
from fanin.clients.device.training.tuning import FineTuning
from fanin.clients.device.training.work import WorkPolicy, all_steps
from fanin.clients.transport import Connection, GrpcTransport
from fanin.edge.runtimes.available import open_runtime
from fanin.protos.calls import device_id_of
from fanin.protos.errors import Conflict
from fanin.protos.names import check_key

LOG = logging.getLogger("fanin.clients")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """The coordinator and the folder of a device.

    Attributes:
        server: HOST:PORT of the coordinator.
        ca: PEM certificate of the coordinator's authority.
        token: Enrollment token; the coordinator checks it once.
        publisher: Public key (hex) of the publisher whose Bundles the device runs.
        folder: The device's folder; no other process may use it.
        runtime: One of ``RUNTIMES``; None for the first that is installed.
        max_cache_bytes: Bytes of downloaded Chunks that are kept.
        save_s: Seconds after which a training is saved at the end of its next epoch; infinity for never.
        shares_condition: Whether check-ins report battery and network of this machine, for the coordinator's operators.
        work: Returns how many of its steps the device does in a Round, such as ``WorkLimit(epochs=0.5)``.
        fine_tune: How the device trains the last Version for its own app once the Run has finished. ``predict`` then
            uses the result. None: it does not.
    """

    server: str
    ca: bytes
    token: str = field(repr=False)
    publisher: str
    folder: Path
    runtime: str | None = None
    max_cache_bytes: int = DEFAULT_MAX_BYTES
    save_s: float = DEFAULT_SAVE_S
    shares_condition: bool = True
    work: WorkPolicy = all_steps
    fine_tune: FineTuning | None = None


@contextmanager
def join(
    settings: DeviceSettings, store: ExampleStore, may_work: Callable[[], bool] = lambda: True
) -> Iterator[Client]:
    """Take part in federated training on a background thread, until the context ends.

    Leaving the context closes the connection and waits until the current batch or piece of a transfer has ended. An
    app that cannot wait may be killed at any moment.

    A permanent failure is logged as an error and kept in ``client.failure``. Examples are a rejected token, and a first
    call to a coordinator whose certificate is not trusted. ``predict`` still uses the last good Version. An exception
    in ``may_work`` or in the store is logged and does not end the client (see ``ClientOptions`` and ``ExampleStore``).

    Args:
        settings: The coordinator and the device's folder.
        store: The device's examples; read at the start of each Round.
        may_work: Called before each step and inside it (see ``ClientOptions``). Return False to pause.

    Yields:
        The client; ``predict`` may be called from any thread.

    Raises:
        RuntimeMissing: No runtime is installed, or not the chosen one.
        InvalidInput: The settings are invalid.
        Conflict: Another process uses the folder.
    """
    runtime = open_runtime(settings.runtime)
    check_key("publisher", settings.publisher)
    with closing(Connection(settings.server, settings.ca)) as line, hold_folder(settings.folder):
        cache = Cache(settings.folder, settings.max_cache_bytes)
        key = cache.key()
        trainer = RuntimeTrainer(runtime, store, policy=SavePolicy(save_s=settings.save_s), work=settings.work)
        place = SitePlace(server=settings.server, runtime=trainer.runtime, publishers=(settings.publisher,))
        serving = Serving(runtime, cache, (settings.publisher,))
        parts = ClientParts(
            transport=GrpcTransport(line, key),
            cache=cache,
            trainer=trainer,
            trusted=(settings.publisher,),
            rng=random.Random(),
            serving=serving,
            tuner=tuner_of(settings.fine_tune, cache, serving, trainer),
            journal=Journal(settings.folder, place, device_id_of(key.public)),
            identity=identity_of(key, certificate=cache.certificate()),
        )
        options = ClientOptions(token=settings.token, may_work=may_work, shares_condition=settings.shares_condition)
        client = Client(parts, options)
        thread = threading.Thread(target=_run, args=(client,), name="fanin client", daemon=True)
        thread.start()
        try:
            yield client
        finally:
            client.stop()
            # A check-in waits until there is work; closing the connection ends it.
            line.close()
            thread.join()


def _run(client: Client) -> None:
    try:
        client.run()
    except Conflict as exc:
        LOG.error("the client stopped: %s", exc)
    except BaseException:
        # A thread that ends by SystemExit prints nothing, and the app's code may raise even that.
        LOG.exception("the client stopped: unexpected error")
