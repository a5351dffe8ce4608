"""The contract of all stores of a database."""

from collections.abc import Callable

from fanin.server.storage.contracts.commands import check_commands
from fanin.server.storage.contracts.devices import check_devices
from fanin.server.storage.contracts.leases import check_leases
from fanin.server.storage.contracts.ledger import check_ledger
from fanin.server.storage.contracts.retention import check_retention
from fanin.server.storage.contracts.rounds import (
    LONGER,
    check_first_round,
    check_last_folded,
    check_later_rounds,
    check_messages,
)
from fanin.server.storage.contracts.runs import check_evaluations, check_runs
from fanin.server.storage.contracts.tokens import check_tokens
from fanin.server.storage.contracts.values import RUN
from fanin.server.storage.stores import Stores


async def check_stores(open_stores: Callable[[], Stores]) -> None:
    """Check the stores of a database.

    Args:
        open_stores: Opens a handle of one database, which is empty at the first call. A handle sees the writes of other
            handles.

    Raises:
        AssertionError: A store breaks its contract. The text says how.
        FaninError: A store refuses a valid call.
    """
    stores = open_stores()
    await check_devices(stores.devices)
    await check_tokens(stores)
    await check_runs(stores.runs)
    driver = await stores.take(RUN)
    await check_first_round(driver)
    await check_later_rounds(driver)
    await check_last_folded(stores)
    await check_messages(stores)
    await check_leases(stores, open_stores())
    await check_commands(stores)
    await check_evaluations(stores.evaluations, LONGER)
    await check_retention(stores, LONGER)
    await check_ledger(stores)
