"""The budget of a Run with privacy: whether its next Round may be released, and what the close of a Round records.

    opening    the ledger of the population with this Round added is within the budget, or the Run rests
    close      checked again, because another Run may have charged the population meanwhile. One transaction records
               the set of Updates, the row of the ledger and the seed of the noise, if no other row came in between
    fold       the noise derives from the recorded seed. A successor reads the same one. With noise on devices, there is
               no seed: the sum has the noise
    published  the transaction erases the seeds and the Updates that the Plan does not keep

So a Run stops before its budget is exceeded, also after a crash, and a Round that closed stays charged if it fails.
"""

from dataclasses import dataclass
from functools import partial

from fanin.protos.errors import Conflict, RuntimeMissing
from fanin.protos.messages import RunRested, RunState, SpentPrivacy
from fanin.protos.plans import Plan
from fanin.protos.texts import counted
from fanin.server.privacy.ledger import Budget, from_text, to_text
from fanin.server.privacy.noising import CentralNoise
from fanin.server.rounds.recent import OpenedRound
from fanin.server.rounds.setup import RunSetup
from fanin.server.rounds.troubles import Damaged
from fanin.server.storage.decisions import uncharged_text
from fanin.server.storage.protocols.ledger import PrivacyCharge
from fanin.server.storage.records import RoundRecord, RunRecord
from fanin.server.storage.stores import Files, Stores


@dataclass(frozen=True, slots=True, kw_only=True)
class NotCharged:
    """Why the next Round of a Run may not be released.

    Attributes:
        code: The code of the reason.
        text: The reason, for operators.
        state: The state in which the Run rests.
    """

    code: str
    text: str
    state: RunState

    @property
    def rested(self) -> RunRested:
        """The event of the Run's rest."""
        return RunRested(state=self.state, reason=f"{self.text} ({self.code})")


async def next_charge(
    setup: RunSetup, opened: OpenedRound | None, lineage: int, stores: Stores, files: Files
) -> PrivacyCharge | NotCharged | None:
    """Return what the close of the next Round records, with a seed of its own, or why there may be none.

    Args:
        setup: The setup of the Run.
        opened: The Round; None if only the budget is in question.
        lineage: The number of the Version with which its lineage began.
        stores: The record.
        files: Its lane runs the accounting.

    Returns:
        None if the Run has no mechanism of privacy.

    Raises:
        InvalidInput: A row of the ledger is damaged, so epsilon is not known.
        RuntimeMissing: The coordinator lacks the extra ``privacy``.
    """
    noise = setup.noise if opened is None else opened.noise
    if noise is None:
        return None
    privacy, release = setup.plan.privacy, noise.release
    population = await stores.ledger.population(privacy.population)
    if population is not None and population.uncharged:
        return NotCharged(
            code="FN-1691",
            text=uncharged_text(population.name, population.uncharged),
            state=RunState.PAUSED,
        )
    ledger = await stores.ledger.counts(privacy.population)
    entries = [(from_text(text), count) for text, count in ledger.counts.items()]
    budget = Budget(epsilon=privacy.epsilon, delta=privacy.delta)
    try:
        after, excess = await files.run(partial(budget.after, entries, (release, 1)))
    except RuntimeMissing as exc:
        raise RuntimeMissing(
            f"run {setup.start.run_id}: its privacy cannot be accounted for at the coordinator: got no package "
            "dp-accounting, expected the extra privacy; run pip install 'fanin[privacy]' where the coordinator runs, "
            "and start it again",
            code="FN-1652",
        ) from exc
    if excess:
        return NotCharged(code="FN-1660", text=excess, state=RunState.FINISHED)
    return PrivacyCharge(
        population=privacy.population,
        after=ledger.newest,
        release=to_text(release),
        epoch=setup.delegation.epoch,
        lineage=lineage,
        epsilon=after,
        delta=privacy.delta,
        seed=setup.draw_seed(0 if opened is None else opened.record.round) if isinstance(noise, CentralNoise) else None,
    )


async def rest_of_budget(setup: RunSetup, stores: Stores, files: Files) -> RunRested | None:
    """Return the rest of a Run whose next Round may not be released, None if it may be. Raises as ``next_charge``."""
    reason = _too_many(setup, stores) or await next_charge(setup, None, 0, stores, files)
    return reason.rested if isinstance(reason, NotCharged) else None


async def check_budget(setup: RunSetup, stores: Stores, files: Files) -> None:
    """Check that a Run may release its next Round. Raises Conflict if it may not, else as ``next_charge``."""
    reason = _too_many(setup, stores) or await next_charge(setup, None, 0, stores, files)
    if isinstance(reason, NotCharged):
        raise Conflict(f"run {setup.start.run_id}: {reason.text}", code=reason.code)


def _too_many(setup: RunSetup, stores: Stores) -> NotCharged | None:
    """Return why no Round may open, if more devices are enrolled than the ledger covers. Its delta is for no more.

    With coins the roster is frozen, so those that enrolled later take no part.
    """
    privacy, num_devices = setup.plan.privacy, stores.devices.num_devices
    if setup.noise is None or setup.coins is not None or num_devices <= privacy.population_size:
        return None
    return NotCharged(
        code="FN-1722",
        text=(
            f"{counted(num_devices, 'device')} are enrolled by now, expected at most {privacy.population_size}, the "
            "population_size of the plan, for which its delta was chosen; remove devices and resume the run, or start "
            "another one with a larger population_size and a delta of at most 1 / population_size"
        ),
        state=RunState.PAUSED,
    )


async def noise_seed(record: RoundRecord, stores: Stores) -> bytes:
    """Return the recorded seed of a closed Round. A successor of a driver that died gets the same one.

    Raises:
        Damaged: There is none.
    """
    charged = await stores.ledger.charged(record.run_id, record.round)
    if charged is None or charged.seed is None:
        raise Damaged("the seed of the noise is missing in the coordinator's database")
    return charged.seed


async def remove_erased(run: RunRecord, stores: Stores, files: Files) -> None:
    """Remove the payloads of the Updates of a Run with privacy that are recorded as erased.

    A process that is killed leaves them to the next one.
    """
    for pending in await stores.retention.pending_rounds() if run.start.plan.privacy else ():
        if pending.run_id == run.start.run_id:
            await files.run(files.spool.remove_committed, pending.updates)
            await stores.retention.finish(pending, stores.wall())


async def spent_privacy(plan: Plan, stores: Stores, clip_norm: float) -> SpentPrivacy | None:
    """Return what the population of a Run has spent, None without a mechanism of privacy.

    Args:
        plan: The Plan of the Run.
        stores: The record.
        clip_norm: The clip norm of a Round of it.
    """
    if not plan.privacy:
        return None
    privacy = plan.privacy
    population = await stores.ledger.population(privacy.population)
    newest = None if population is None else population.newest
    return SpentPrivacy(
        population=privacy.population,
        epsilon=0.0 if newest is None else newest.epsilon,
        delta=privacy.delta if newest is None else newest.delta,
        budget=privacy.epsilon,
        clip_norm=clip_norm,
        is_charge_due=population is not None and bool(population.uncharged),
    )
