"""A device within an app, in one call: it takes part on a thread of its own, and the app asks it.

    with joined(home, store, may_work=is_idle_and_charged) as client:
        client.predict(x)

It is put together as ``fanin join --serve`` is. Whoever wants other parts makes ``Client`` of them.
"""

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fanin.clients.data.examples import ExampleStore
from fanin.clients.device.client import Client, ClientOptions, ClientParts
from fanin.clients.device.serving import Serving
from fanin.clients.device.storage.cache import DEFAULT_MAX_BYTES, Cache, hold_folder
from fanin.clients.device.training import RuntimeTrainer
from fanin.clients.transport import Connection, GrpcTransport
from fanin.edge.runtimes.available import open_runtime
from fanin.protos.errors import Conflict
from fanin.protos.names import check_key

LOG = logging.getLogger("fanin.clients")


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where a device belongs, and where it keeps what it has.

    ``server`` is the coordinator's HOST:PORT, ``ca`` the certificate of its authority, ``token`` what enrolls devices
    (asked for once), ``publisher`` the public key (hex) whose Bundles are trusted. ``folder`` is the device's own; no
    other process may use it. ``runtime`` is one of ``RUNTIMES``, None the first that is installed.
    """

    server: str
    ca: bytes
    token: str = field(repr=False)
    publisher: str
    folder: Path
    runtime: str | None = None
    max_cache_bytes: int = DEFAULT_MAX_BYTES


@contextmanager
def joined(home: Home, store: ExampleStore, may_work: Callable[[], bool] = lambda: True) -> Iterator[Client]:
    """A client that takes part while the block lasts, whenever ``may_work``; its ``predict`` is for any thread.

    Leaving the block hangs up and waits until training under way has ended; an app that cannot wait may be killed at
    any moment.

    What ends the client early (a coordinator that refuses its token) is logged as an error and kept in
    ``client.failure``; ``predict`` still answers from the last good Version. An exception in ``may_work`` or in the
    store is logged and does not end the client (``ClientOptions``, ``ExampleStore``).

    Raises RuntimeMissing, InvalidInput for a home that is none, Conflict if the folder is in use.
    """
    runtime = open_runtime(home.runtime)
    check_key("publisher", home.publisher)
    with closing(Connection(home.server, home.ca)) as line, hold_folder(home.folder):
        cache = Cache(home.folder, home.max_cache_bytes)
        parts = ClientParts(
            transport=GrpcTransport(line, cache.key()),
            cache=cache,
            trainer=RuntimeTrainer(runtime, store),
            trusted=(home.publisher,),
            rng=random.Random(),
            serving=Serving(runtime, cache, (home.publisher,)),
        )
        client = Client(parts, ClientOptions(token=home.token, may_work=may_work))
        thread = threading.Thread(target=_run, args=(client,), name="fanin client", daemon=True)
        thread.start()
        try:
            yield client
        finally:
            client.stop()
            # A check-in hangs until there is work: hanging up ends it.
            line.close()
            thread.join()


def _run(client: Client) -> None:
    try:
        client.run()
    except Conflict as exc:
        LOG.error("this device takes no further part: %s", exc)
    except BaseException:
        # A thread that ends by SystemExit says nothing, and the app's code may raise even that.
        LOG.exception("this device takes no further part: unexpected error")
