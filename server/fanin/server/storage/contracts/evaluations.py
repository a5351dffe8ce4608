"""The contract of evaluations of Versions."""

from fanin.protos.messages import VersionEvaluation
from fanin.server.storage.protocols.evaluations import EvaluationStore


async def check_evaluations(evaluations: EvaluationStore, run_id: str) -> None:
    """Check a store in which a Run has the Versions 0 to 3 and no evaluation. Raises AssertionError."""
    assert await evaluations.unevaluated(run_id, -1) == frozenset({0, 1, 2, 3}), "unevaluated: lost Versions"
    assert await evaluations.unevaluated(run_id, 1) == frozenset({2, 3}), (
        "unevaluated: returned Versions up to ``above``"
    )
    assert await evaluations.evaluation_page(run_id, 0) == (), "evaluation_page: returned one that is not recorded"
    none = (await evaluations.newest_evaluation(run_id), await evaluations.best_evaluation(run_id))
    assert none == (None, None), "newest_evaluation, best_evaluation: returned one that is not recorded"
    failed, zero, one, two = _problem(1), _evaluation(0, 0.5), _evaluation(1, 0.25), _evaluation(2, 0.25)
    await evaluations.add_evaluation(run_id, failed, None)
    assert 1 in await evaluations.unevaluated(run_id, 0), "unevaluated: lost a Version that has only a problem"
    assert await evaluations.newest_evaluation(run_id) == failed, "newest_evaluation: ignored one with a problem"
    assert await evaluations.best_evaluation(run_id) is None, "best_evaluation: returned one with a problem"
    for each in (two, zero, one):
        await evaluations.add_evaluation(run_id, each, -each.values["loss"])
    assert await evaluations.evaluation_page(run_id, 0) == (zero, one, two), (
        "add_evaluation: kept a problem, or lost order"
    )
    await evaluations.add_evaluation(run_id, _problem(2), None)
    await evaluations.add_evaluation(run_id, _evaluation(2, 9.0), -9.0)
    assert await evaluations.evaluation_page(run_id, 2) == (two,), "add_evaluation: changed one that is final"
    assert await evaluations.unevaluated(run_id, -1) == frozenset({3}), "unevaluated: returned an evaluated Version"
    assert await evaluations.newest_evaluation(run_id) == two, "newest_evaluation: expected the newest Version's"
    assert await evaluations.best_evaluation(run_id) == one, "best_evaluation: expected the oldest of the best"
    assert await evaluations.best_evaluation("other") is None, "best_evaluation: returned one of another Run"


def _evaluation(version: int, loss: float) -> VersionEvaluation:
    return VersionEvaluation(
        version=version,
        data="contract",
        data_sha256="ab" * 32,
        num_examples=7,
        values={"loss": loss},
        runtime="contract 1",
        seconds=1.0,
        time=30.0 + version,
    )


def _problem(version: int) -> VersionEvaluation:
    return VersionEvaluation(version=version, data="contract", time=30.0, problem="the process ended")
