"""Ranks that are forks of one process, which has imported torch."""

import multiprocessing
from collections.abc import Callable


def run_ranks(work: Callable[..., None], num_ranks: int, *arguments: object) -> int:
    """Call ``work(*arguments, rank)`` in a fork for each rank. Return the number of ranks that failed."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=work, args=(*arguments, rank)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return sum(process.exitcode != 0 for process in ranks)
