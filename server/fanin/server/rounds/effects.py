"""The effects of one Round, carried out: from committed payloads to a recorded Version.

Each method may be repeated after any failure and after a restart, and the result is bit-identical. The sum is a cache
that is rebuilt from the set of Updates. Blobs are named by content. The database changes in one transaction. Stored
data that fails verification raises Damaged, because no repetition can succeed.

The driver (``runs.driving.driver``) calls these methods in the order that the round machine decides.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from fanin.edge.bundles.versions import add_auxiliary, sign_version
from fanin.edge.codecs.fixed import Integers
from fanin.edge.rings import Adjustment
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.chunks import Artifact
from fanin.protos.errors import Corrupted, NotFound
from fanin.server.aggregation.auxiliary import AuxiliaryStep, RangeRefresh
from fanin.server.aggregation.fold import Contribution
from fanin.server.aggregation.folding import FoldResult, Lag, OuterStep, SpooledUpdates, StateSlices, lag_of
from fanin.server.aggregation.methods.feddyn import state_before
from fanin.server.aggregation.outer import RoundStep
from fanin.server.aggregation.parameters import (
    encode_parameters,
    encode_state,
    parameter_pieces,
    state_slices,
    strategy_state,
)
from fanin.server.aggregation.rules import STRATEGY_STATE, ColumnRule, Rule, StrategyResult, StrategyRule
from fanin.server.aggregation.sets import Aggregate, SetFold
from fanin.server.aggregation.statistics import (
    credible_counts,
    device_spreads_of,
    evaluation_of,
    examples_key,
    reported_examples,
    runtimes_of,
    saturated_devices_of,
    train_loss_of,
)
from fanin.server.aggregation.weights import RunningScale, scale_of
from fanin.server.privacy.noising import CLIPPING, NOISED_SUM, CentralNoise
from fanin.server.rounds.charging import NotCharged, next_charge, spent_privacy
from fanin.server.rounds.messages import adjustment_in
from fanin.server.rounds.recent import OpenedRound, RecentRounds, WorkTime, round_times
from fanin.server.rounds.reported import UpdateFacts, reported
from fanin.server.rounds.setup import RunSetup
from fanin.server.rounds.troubles import Damaged, damaged_update
from fanin.server.storage.protocols.rounds import PAGE_UPDATES
from fanin.server.storage.records import CommittedUpdate, MeasuredRanges, OuterState, RoundMark, RoundRecord, Shortage
from fanin.server.storage.stores import DriverStores, Files


class RoundWork:
    """The work on one Round: accumulate, close, fold, publish, or fail.

    Args:
        opened: The Round and its base Version.
        recent: The Rounds for which the Updates of this Round may have been made.
        setup: The setup of the Run.
        stores: The record of the Round.
        files: The payloads of the Updates, and the blobs of the Versions.

    Attributes:
        outer_step_at_s: Wall time at which the sum was complete and the outer step began, None before that.
    """

    def __init__(
        self, opened: OpenedRound, recent: RecentRounds, setup: RunSetup, stores: DriverStores, files: Files
    ) -> None:
        self.outer_step_at_s: float | None = None
        self.record = opened.record
        self.base = opened.base
        self._opened = opened
        self._recent = recent
        self._setup = setup
        self._stores = stores
        self._files = files
        # Facts of all Updates, and the headers of those that wait to be added to the sum. A header lists all Chunks of
        # its payload, so it is kept no longer.
        self._facts: dict[str, UpdateFacts] = {}
        self._headers: dict[str, m.UpdateHeader] = {}
        self._statistics: dict[str, Mapping[str, int]] = {}
        self._resumed_bytes = 0
        self._work: list[tuple[WorkTime, float]] = []
        self._closed_at_s = 0.0
        self._scale = RunningScale(setup.plan)
        self._state: OuterState = {}
        self._num_steps = 0
        self._set_fold = SetFold(self._rule(), setup.layout.total_table, opened.record.grid, self._contribution)
        self._updates = SpooledUpdates(
            plan=setup.plan, codec=setup.codec.codec, layout=setup.layout, spool=files.spool, vector=setup.vector
        )
        self._folded: _Folded | None = None

    def add_committed(self, update: CommittedUpdate, resumed_bytes: int = 0, time: WorkTime | None = None) -> None:
        """Remember a committed Update, and its header until ``accumulate`` adds it.

        Args:
            update: The Update.
            resumed_bytes: Bytes of the payload that a connection before the last one had delivered.
            time: When the device worked for it, None if that is not known.
        """
        self._remember(update)
        if time is not None:
            self._work.append((time, update.header.telemetry.train_s))
        self._headers[update.device_id] = update.header
        self._resumed_bytes += resumed_bytes

    async def accumulate(self, device: str) -> None:
        """Add one committed Update to the sum. Right after its commit its bytes are still in the page cache."""
        self._scale.add(device, self._facts[device].weight)
        self._set_fold.weigh(self._scale.value)
        async for headers in self._headers_of((device,)):
            await self._files.run(self._accumulate, headers)

    async def close(self, shortage: Shortage) -> RoundRecord:
        """Record the set of Updates or, without a quorum, the failure. Return the record after that."""
        record, stores, cohort = self.record, self._stores, self._setup.plan.cohort
        if (only := self._opened.only) is not None:
            cohort = replace(cohort, quorum=max(cohort.quorum, len(only)))
            shortage = replace(shortage, cause=shortage.cause or "each device of the query's first round must answer")
        self._closed_at_s = stores.wall()
        closed = record
        # Another Run may charge the population between the check of the budget and the transaction.
        while closed.mark is RoundMark.OPEN:
            charge = await next_charge(self._setup, self._opened, self._recent.lineage, stores, self._files)
            if isinstance(charge, NotCharged):
                # The answer of an earlier try may have been lost, after it closed the Round.
                last = await stores.rounds.last(record.run_id)
                assert last is not None, "a driver closes a recorded round"
                if last.mark is RoundMark.OPEN:
                    return await self.fail(f"{charge.text} ({charge.code})")
                charge = None
            closed = await stores.writer.close(
                record.round, cohort=cohort, now_s=self._closed_at_s, shortage=shortage, charge=charge
            )
        # Commits whose reports were lost are in the record only.
        unknown = tuple(device for device in closed.accepted if device not in self._facts)
        for first in range(0, len(unknown), PAGE_UPDATES):
            page = unknown[first : first + PAGE_UPDATES]
            updates = await stores.rounds.updates_of(record.run_id, record.round, page)
            for update in sorted(updates, key=lambda update: page.index(update.device_id)):
                self._remember(update)
        return closed

    async def fold(self, accepted: tuple[str, ...]) -> None:
        """Compute the next tensors from the Updates of exactly these devices, and store them as blobs."""
        self._state = await self._stores.rounds.recorded_state(self.base)
        self._num_steps = await self._stores.rounds.recorded_steps(self.base)
        await self._files.run(self._weigh, accepted)
        missing = tuple(device for device in accepted if device not in self._set_fold.added)
        async for headers in self._headers_of(missing):
            await self._files.run(self._accumulate, headers)
        record = replace(self.record, accepted=accepted)
        adjustment = await adjustment_in(self._setup, record, self._opened.noise, self._stores)
        aggregate, folded = await self._files.run(self._fold, accepted, adjustment)
        measured = await self._measured(folded.parameters)
        auxiliary = await self._files.run(self._fold_auxiliary, aggregate, len(accepted), measured)
        self._folded = replace(folded, auxiliary=auxiliary)
        # The next Round begins its sum while this work is still referenced.
        self._set_fold.release()

    async def publish(self, coverage: m.Coverage) -> RoundRecord:
        """Sign and record the Version, with the coverage of its Round. Return the record after that."""
        assert self._folded is not None, "publish comes after fold"
        folded = self._folded
        signed = self._signed(folded.parameters)
        if folded.auxiliary:
            signed = add_auxiliary(self._setup.run_key, signed, folded.auxiliary)
        version = replace(signed, delegation=self._setup.delegation)
        now_s = self._stores.wall()
        # By now another Run may have charged the population, too.
        privacy = await spent_privacy(self._setup.plan, self._stores, self._opened.clip_norm)
        event = replace(self._publication(version, folded, now_s), coverage=coverage, privacy=privacy)
        return await self._stores.writer.publish(
            version, event, next_grid=folded.result.next_grid, outer_state=folded.outer_state, now_s=now_s
        )

    @property
    def measured(self) -> MeasuredRanges | None:
        """The recorded ranges of the Version on a data set; None if the Plan does not ask for them."""
        return self.record.measured

    @property
    def facts(self) -> Mapping[str, UpdateFacts]:
        """The facts of the Updates, by device."""
        return self._facts

    @property
    def unsaved(self) -> str:
        """Why the state of the strategy cannot be saved after the fold; empty if it is, or without a strategy."""
        strategy = None if self._folded is None else self._folded.strategy
        return "" if strategy is None else strategy.unsaved

    async def fail(self, reason: str) -> RoundRecord:
        """Record the failure of the Round, unless it has ended. Return the record after that."""
        record, stores = self.record, self._stores
        return await stores.writer.fail(record.round, reason=reason, now_s=stores.wall())

    def _signed(self, parameters: Artifact) -> m.Version:
        return sign_version(
            self._setup.run_key,
            parent=self.base,
            run_id=self.record.run_id,
            bundle_sha256=self._setup.bundle.manifest.sha256,
            parameters=parameters,
        )

    async def _measured(self, parameters: Artifact) -> MeasuredRanges | None:
        """Return the recorded ranges of the next Version. They are measured once, and recorded before they are used.

        A successor would get other bits from another library, or none from a process that fails.
        """
        if self._setup.measure is not None and self.record.measured is None:
            measured = await self._setup.measure(self._signed(parameters))
            kept = await self._stores.writer.keep_ranges(self.record.round, measured)
            self.record = replace(self.record, measured=kept.measured)
        return self.record.measured

    def _publication(self, version: m.Version, folded: "_Folded", now_s: float) -> m.VersionPublished:
        result, facts, opened_at_s = folded.result, tuple(self._facts.values()), self.record.opened_at_s
        return m.VersionPublished(
            number=version.number,
            version_sha256=version.sha256,
            parent=version.parent,
            round=self.record.round,
            round_s=now_s - opened_at_s,
            bytes_down=sum(each.telemetry.bytes_downloaded for each in facts),
            bytes_up=sum(each.wire_bytes for each in facts),
            bytes_down_resumed=sum(each.telemetry.bytes_resumed for each in facts),
            bytes_up_resumed=self._resumed_bytes,
            num_saturated=result.counts.get(m.SATURATED, 0),
            saturated=folded.saturated,
            num_rounded=result.counts.get(m.ROUNDED, 0),
            num_clamped=result.num_clamped,
            num_stale=sum(each.is_stale for each in facts),
            train_loss=train_loss_of(result.counts),
            train_loss_examples=result.counts.get(examples_key(m.TRAIN_LOSS), 0),
            total_examples=result.counts.get(m.TRAINED, 0),
            evaluation=folded.evaluation,
            runtimes=runtimes_of(each.telemetry.runtime for each in facts),
            statistics={
                each.name: result.counts[each.name]
                for each in self._setup.plan.statistics
                if each.name in result.counts
            },
            statistics_examples=reported_examples(result.counts, [each.name for each in self._setup.plan.statistics]),
            device_spreads=folded.device_spreads,
            not_reproducible=folded.strategy is not None and not self._setup.plan.flower.strategy_is_pure,
            strategy_metrics={} if folded.strategy is None else folded.strategy.metrics,
            times=round_times(self._work, self._closed_at_s - opened_at_s, now_s - opened_at_s),
        )

    def _remember(self, update: CommittedUpdate) -> None:
        is_stale = self._lag(update.header).staleness > 0
        self._facts[update.device_id] = reported(update, self._setup, is_stale=is_stale)

    async def _headers_of(self, devices: Sequence[str]) -> AsyncIterator[Mapping[str, m.UpdateHeader]]:
        """Yield the headers of these devices' Updates, a page at a time, from memory or from the record."""
        for first in range(0, len(devices), PAGE_UPDATES):
            page = devices[first : first + PAGE_UPDATES]
            missing = [device for device in page if device not in self._headers]
            record = self.record
            updates = await self._stores.rounds.updates_of(record.run_id, record.round, missing) if missing else ()
            recorded = {update.device_id: update.header for update in updates}
            yield {device: recorded.get(device) or self._headers[device] for device in page}

    def _weigh(self, accepted: tuple[str, ...]) -> None:
        weights = [self._facts[device].weight for device in accepted]
        self._set_fold.weigh(scale_of(weights, self._setup.plan.max_total_examples))

    def _accumulate(self, headers: Mapping[str, m.UpdateHeader]) -> None:
        for device, header in headers.items():
            self._headers[device] = header
            try:
                self._set_fold.add(device)
            except Corrupted as exc:
                raise damaged_update(device) from exc
            self._statistics[device] = header.statistics.counts
            del self._headers[device]

    def _contribution(self, device: str, scale: int) -> Contribution:
        header = self._headers[device]
        contribution = self._updates.contribution(header, device, self._lag(header, scale))
        if contribution.read is None:
            return contribution

        def read(first: int, last: int) -> Integers:
            assert contribution.read is not None, "a payload in the spool can be read again"
            try:
                return contribution.read(first, last)
            except Corrupted as exc:
                raise damaged_update(device) from exc

        return replace(contribution, read=read)

    def _lag(self, header: m.UpdateHeader, scale: int = 0) -> Lag:
        origin = self._recent.get(header.round)
        assert origin is not None, "an update is accepted only for a round that is remembered"
        return lag_of(origin.record, self.record, scale)

    def _rule(self) -> Rule | ColumnRule | StrategyRule:
        setup, blobs = self._setup, self._files.blobs
        if setup.strategy is None:
            return setup.rule
        return StrategyRule(
            runner=setup.strategy,
            plan=setup.plan,
            round=self.record.round,
            table=setup.layout.total_table,
            base=lambda: parameter_pieces(blobs, self.base, setup.table),
            is_first=self.base.number == 0,
            state=lambda: strategy_state(blobs, self._state),
        )

    def _fold(
        self, accepted: tuple[str, ...], adjustment: Callable[[], Adjustment | None]
    ) -> "tuple[Aggregate, _Folded]":
        """Store the next parameters and the outer state. Return the sums, and the results without auxiliary tensors."""
        blobs, setup, table = self._files.blobs, self._setup, self._setup.table

        def inputs() -> tuple[Iterator[Float32s], StateSlices]:
            is_first = self.base.number == self._recent.lineage
            state = state_before(setup.optimizer, setup.optimizer.tensors, self._state, is_first=is_first)
            return parameter_pieces(blobs, self.base, table), state_slices(blobs, state)

        with self._intact_base():
            aggregate = self._set_fold.complete(accepted, adjustment())
            self.outer_step_at_s = self._stores.wall()
            # In slices: besides the sum, a model of 2 GB needs no more memory than a small one.
            round_step = RoundStep.of(setup.plan, setup.optimizer, self.record.round, self._num_steps)
            step = OuterStep(aggregate, setup.layout, self.record.grid, setup.codec, round_step)
            # Of earlier Versions, only statistics and counters are used: the devices' values are relative to them.
            earlier = {
                staleness: parameter_pieces(blobs, self._recent.base(self.base.number - staleness), table)
                for staleness in aggregate.stale_shares
            }
            parameters = blobs.put_pieces(encode_parameters(table, step.parameters(*inputs(), earlier)))
            after = {
                name: blobs.put_pieces(encode_state(step.state(name, *inputs()))) for name in setup.optimizer.tensors
            }
            if aggregate.strategy is not None:
                after[STRATEGY_STATE] = blobs.put_pieces((aggregate.strategy.state,))
            noise = self._opened.noise
            if isinstance(noise, CentralNoise) and aggregate.sums is not None:
                after[NOISED_SUM] = blobs.put_pieces(noise.encoded(aggregate.sums))
                if noise.bits_noise:
                    after[CLIPPING] = blobs.put_pieces((noise.encoded_clipping(aggregate.counts),))
        # Here, because the time of both grows with the cohort.
        by_device, num_classes = {device: self._statistics[device] for device in accepted}, setup.manifest.num_classes
        statistics, result = tuple(by_device.values()), step.result()
        # Of masked Updates the sums alone are known.
        counts = result.counts if setup.protocol.is_masked else credible_counts(statistics, num_classes)
        return aggregate, _Folded(
            result=result,
            parameters=parameters,
            outer_state=after,
            auxiliary={},
            strategy=aggregate.strategy,
            evaluation=evaluation_of(counts, num_classes),
            device_spreads=device_spreads_of(statistics),
            saturated=saturated_devices_of(by_device, setup.layout.total_table.num_values),
        )

    def _fold_auxiliary(
        self, aggregate: Aggregate, num_updates: int, measured: MeasuredRanges | None
    ) -> Mapping[str, Artifact]:
        """Store the next auxiliary tensors as blobs. Return them by name, in the order of a Version."""
        blobs, setup = self._files.blobs, self._setup
        refresh = RangeRefresh(activations=setup.activations, measured=measured)
        step = AuxiliaryStep(aggregate, setup.layout, setup.stages, num_updates, refresh)
        with self._intact_base():
            return {name: blobs.put_pieces(step.encoded(name, blobs, self.base)) for name in step.tensors}

    @contextmanager
    def _intact_base(self) -> Iterator[None]:
        """Raise Damaged if the tensors of the base Version are missing or damaged."""
        try:
            yield
        except (Corrupted, NotFound) as exc:
            raise Damaged(f"version {self.base.number} is damaged on the coordinator's disk") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folded:
    """The stored results of the fold."""

    result: FoldResult
    parameters: Artifact
    outer_state: OuterState
    auxiliary: Mapping[str, Artifact]
    strategy: StrategyResult | None
    evaluation: m.Evaluation | None
    device_spreads: Mapping[str, m.DeviceSpread]
    saturated: m.SaturatedDevices
