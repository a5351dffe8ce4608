"""The centralized baseline of a result."""

from dataclasses import replace
from typing import Final

from fanin.protos.errors import FaninError
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.preparation import Preparation
from fanin.simulation.result import Result
from fanin.simulation.settings import SimulationSettings
from fanin.simulation.studies.baseline import Baseline, BaselineRow, pooled
from fanin.simulation.studies.versions import TestedVersions, model_examples

INTERRUPTED: Final = "Ctrl-C"


def with_baseline(
    prepared: Preparation,
    clients: Partition,
    evaluation: TestedVersions,
    settings: SimulationSettings,
    result: Result,
) -> Result:
    """Return the result with the centralized baseline, if the settings ask for one.

    An error or Ctrl-C ends the baseline alone: the result of the federation is complete.
    """
    if not settings.baseline:
        return result
    bundle, graphs = prepared.bundle, evaluation.graphs
    rows: list[BaselineRow] = []
    try:
        prepared.progress.step("training the centralized baseline")
        train = model_examples(pooled(clients, settings.validation_fraction), bundle, graphs)
        baseline = Baseline(bundle=bundle, graphs=graphs, train=train, test=evaluation.test, plan=evaluation.plan)
        for row in baseline.rows(result.rounds, result.clients):
            rows.append(row)
            prepared.progress.baseline(row, result.rounds[-1].round)
    except FaninError as exc:
        prepared.progress.show(f"the baseline ended early: {exc}")
        return replace(result, baseline=tuple(rows), baseline_end=str(exc))
    except KeyboardInterrupt:
        return replace(result, baseline=tuple(rows), baseline_end=INTERRUPTED, is_complete=False)
    return replace(result, baseline=tuple(rows))
