"""The quality of the last Version for each client of a result."""

from dataclasses import dataclass, replace

from fanin.protos.chunks import artifact_of
from fanin.protos.messages import BundleRef, Publication
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.preparation import Preparation
from fanin.simulation.result import Result
from fanin.simulation.rows import ClientFailure, OnFailure
from fanin.simulation.settings import SimulationSettings
from fanin.simulation.simulated_run import RUN, RowLists
from fanin.simulation.studies.per_client import ClientQuality, ClientTests, LastVersion, summary_of
from fanin.simulation.studies.versions import TestedVersions, model_examples
from fanin.simulation.workers import Trainings


@dataclass(frozen=True, slots=True, kw_only=True)
class PerClient:
    """What the evaluation by each client needs of a simulation.

    Attributes:
        prepared: The Bundle.
        clients: Their other examples.
        settings: The test examples of the clients, and their fine-tuning.
        evaluation: The graphs, the Plan and the metrics.
        trainings: Trains the clients.
        fail: Called with each error in a fine-tuning.
    """

    prepared: Preparation
    clients: Partition
    settings: SimulationSettings
    evaluation: TestedVersions
    trainings: Trainings
    fail: OnFailure

    def added(self, result: Result, rows: RowLists) -> Result:
        """Return the result with the quality for each client, if the settings have test examples of the clients.

        Ctrl-C ends the evaluation: the result has the clients before it.
        """
        tests, seed = self.settings.client_test, self.settings.seed
        if tests is None or rows.newest is None:
            return result
        bundle, graphs, failures = self.prepared.bundle, self.evaluation.graphs, list(result.failures)

        def fail(failure: ClientFailure) -> None:
            failures.append(replace(failure, seed=seed))
            self.fail(failures[-1])

        version, values = rows.newest
        work = "evaluating" if self.settings.fine_tune is None else "fine-tuning and evaluating"
        self.prepared.progress.step(f"{work} the last version on each client")
        each = ClientTests(
            bundle=bundle,
            graphs=graphs,
            tests=replace(tests, examples=model_examples(tests.examples, bundle, graphs)),
            stores=lambda client: self.clients.store(client, self.settings.validation_fraction),
            metrics=self.evaluation.metrics,
            trainings=self.trainings,
            training=self.evaluation.plan.training_in(max(result.rounds[-1].round, 1)),
            fine_tune=self.settings.fine_tune,
            fail=fail,
        )
        signed = bundle.signed
        ref = BundleRef(manifest=artifact_of(signed.data), public_key=signed.public_key, signature=signed.signature)
        publication = Publication(download_id=RUN, run_id=version.run_id, bundle=ref, version=version)
        qualities: list[ClientQuality] = []
        is_complete = result.is_complete
        try:
            for row in each.rows(LastVersion(publication=publication, values=values, local=rows.local)):
                qualities.append(replace(row, seed=seed))
        except KeyboardInterrupt:
            is_complete = False
        return replace(
            result,
            per_client=tuple(qualities),
            per_client_summary=summary_of(qualities, self.evaluation.metrics),
            failures=tuple(failures),
            is_complete=is_complete,
        )
