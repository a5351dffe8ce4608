"""Where one Run is: its record, the machine of the Round that is under way, and the devices at work for it.

The driver moves a Run along its course and ``intake`` answers devices from it. All of it is used on the event loop
only, so it is consistent between two awaits.
"""

import asyncio
from collections.abc import Callable

from fanin.protos.control import RunState
from fanin.server.rounds import events as e
from fanin.server.rounds import machine as r
from fanin.server.rounds.effects import Model, RoundWork, Tools
from fanin.server.rounds.opening import Moment, begun
from fanin.server.rounds.recent import AtWork, Made, RecentRounds
from fanin.server.rounds.worker import Worker
from fanin.server.storage.sqlite.rounds import CommittedUpdate
from fanin.server.storage.sqlite.runs import RunRecord


class Course:
    """The state of one Run in this process. ``round`` and ``work`` are None while no Round is under way."""

    def __init__(self, run: RunRecord, model: Model, tools: Tools, on_change: Callable[[], None]) -> None:
        self.run = run
        self.model = model
        self.round: r.Round | None = None
        self.work: RoundWork | None = None
        self.recent = RecentRounds(run.start.plan.aggregation.max_staleness)
        self.at_work = AtWork()
        self.worker = Worker(run.start.run_id, tools.observer)
        self.is_leaving = False
        self.lacks_space = False
        self.changed = asyncio.Event()
        self._tools = tools
        self.on_change = on_change
        self._timer: asyncio.TimerHandle | None = None

    @property
    def run_id(self) -> str:
        """The Run's id."""
        return self.run.start.run_id

    @property
    def is_open(self) -> bool:
        """Whether a Round takes Updates."""
        return self.round is not None and self.round.is_open

    @property
    def is_paused(self) -> bool:
        """Whether nobody can say what becomes of an Update: the Run is paused, or the coordinator is leaving."""
        return self.run.state is RunState.PAUSED or self.is_leaving

    def now(self) -> float:
        """Seconds on the clock of the machine."""
        return asyncio.get_running_loop().time()

    def announce(self) -> None:
        """Wake those who watch the Run, and those who wait for work."""
        self.changed.set()
        self.changed = asyncio.Event()
        self.on_change()

    def step(self, event: e.Event) -> tuple[e.Effect, ...]:
        """Tell the machine what happened, and have its effects carried out."""
        assert self.round is not None, f"{event} without a round"
        self.round, effects = self.round.step(event, self.now())
        self._put(effects)
        self._set_timer()
        return effects

    def report(self, work: RoundWork, event: e.Event) -> None:
        """The outcome of an effect, unless its Round has ended in the meantime."""
        if work is self.work and self.round is not None and not self.round.has_ended:
            self.step(event)

    def begin(self, made: Made, recorded: tuple[CommittedUpdate, ...] = (), *, resumes: bool = False) -> RoundWork:
        """Start the machine of a Round whose record has some Updates already.

        ``resumes``: the Round was under way in a process that ended.
        """
        self.recent.add(made)
        moment = Moment(now=self.now(), wall_s=self._tools.wall())
        carried = self.at_work.carry(self.recent, made.record, moment.now)
        self.work = RoundWork(made, self.recent, self.run.start, self.model, self._tools)
        # Those of the record were assigned, or they could not have sent anything.
        devices = carried | {update.device_id for update in recorded}
        self.round, effects = begun(self.run, made.record, devices, moment, resumes=resumes)
        self._put(effects)
        for update in recorded:
            self.work.add_committed(update.device_id, update.header)
            # If time has closed it while nobody was here, the record tells it of the rest.
            if self.round.is_open:
                self.step(e.UpdateCommitted(device=update.device_id))
        self._set_timer()
        return self.work

    def end(self) -> None:
        """Leave a Round that has ended."""
        if self.round is not None and self.round.phase is r.Phase.FAILED:
            # Who missed a deadline does not keep a place.
            self.at_work = AtWork()
        self.work, self.round = None, None
        self.lacks_space = False

    def stop_clock(self) -> None:
        """Let time alone change nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _put(self, effects: tuple[e.Effect, ...]) -> None:
        for effect in effects:
            if not isinstance(effect, e.Assign):
                self.worker.put(self.work, effect)

    def _set_timer(self) -> None:
        self.stop_clock()
        wake_at = None if self.round is None else self.round.wake_at
        if wake_at is not None:
            self._timer = asyncio.get_running_loop().call_at(wake_at, self.step, e.TimePassed())
