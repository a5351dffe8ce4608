"""The coordinator of a federation.

``Coordinator`` is the front door: the device side of a coordinator, for tests and simulations in one process.
``fanin serve`` composes it with the other rooms:

    service.py, settings.py, folder.py    gRPC servicers, settings, the durable state of one folder
    access/        who may call: certificates, tokens, roles, signatures, limits of connections and uploads
    administration/  tokens, devices and the audit log, for those who run the coordinator
    evaluation/    Versions on held-out data
    fleet/         the device side: check-ins, downloads, uploads
    runs/          the operator side: Runs, their drivers, commands
    rounds/        one Round: its record, its effects
    protocols/     the round machine, and the phases and messages of each protocol
    selection/     which waiting devices get the free places
    aggregation/   sums, the outer step, verification
    strategies/    strategies of Flower in child processes
    privacy/       accounting of differential privacy
    storage/       the database, blobs and spool
    web/           the page for browsers
    telemetry/     metrics and traces
    care/          retention, backups, certificates and the disk over months
    health.py      whether it serves
    addresses.py   the addresses at which clients reach it

Imports go in one direction: ``service`` -> ``fleet`` -> ``access`` and ``runs``; ``runs`` -> ``rounds`` ->
``aggregation`` -> ``storage``. ``runs`` also uses ``strategies``, and ``strategies`` uses ``aggregation``. ``access``
uses only ``storage``; ``rounds`` uses
``protocols``, which uses ``selection``, which uses no other room.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fanin.server.fleet.coordinator import Coordinator

__all__ = ["Coordinator"]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: ``fanin.server.settings`` must not load SQLAlchemy."""
    if name == "Coordinator":
        from fanin.server.fleet.coordinator import Coordinator

        return Coordinator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
