"""A command of an operator, with its entries in the audit log: the same from a program and from the page."""

from fanin.protos.messages import Command, Principal, RunInfo
from fanin.server.administration.audit import AuditLog
from fanin.server.runs.catalog import Runs


async def carry_out(command: Command, by: Principal, runs: Runs, audit: AuditLog) -> RunInfo:
    """Carry out a command of ``by``. Raises the errors of ``Runs.command``."""
    what = type(command.what).__name__.lower()
    async with audit.around(by, "Command", f"run {command.run_id}: {what} {command.command_id}"):
        return await runs.command(command)
