"""Random choices of examples: held-out parts, stratified choices and non-IID partitions.

Every choice comes from a generator that is passed in, never from a clock or a device id. So a partition is the same on
every machine.
"""

import numpy as np

from fanin.clients.data.examples import Examples
from fanin.edge.runtimes.base import Inputs
from fanin.edge.tensors import Int64s


def hold_out(examples: Examples, num_held: int, rng: np.random.Generator) -> tuple[Examples, Examples]:
    """Split examples at random into a rest and a held-out part.

    Args:
        examples: The examples.
        num_held: Size of the held-out part. It has the same mix of labels; sequences and values have no labels.
        rng: Source of the choice.

    Returns:
        The rest and the held-out part.
    """
    rest, held = held_out_rows(examples.y, num_held, rng)
    return examples.take(rest), examples.take(held)


def held_out_rows(targets: Inputs, num_held: int, rng: np.random.Generator) -> tuple[Int64s, Int64s]:
    """Return the indices of a rest and of a held-out part, each ascending. See ``hold_out``.

    Args:
        targets: The targets of the examples (n, ...).
        num_held: Size of the held-out part.
        rng: Source of the choice.
    """
    num = len(targets)
    if not 0 < num_held < num:
        raise ValueError(f"hold out: got {num_held} of {num} examples, expected 1 to {num - 1}")
    is_labels = targets.ndim == 1 and targets.dtype == np.int32
    # Targets without labels all count as one class.
    held = stratified_choice(targets if is_labels else np.zeros(num, np.int32), num_held, rng)
    is_rest = np.ones(num, np.bool_)
    is_rest[held] = False
    return np.flatnonzero(is_rest), held


def stratified_choice(labels: Inputs, num_chosen: int, rng: np.random.Generator) -> Int64s:
    """Choose examples whose mix of labels is as close as possible to that of all labels (largest remainders).

    Args:
        labels: Labels (n,).
        num_chosen: Number of examples to choose, at most n.
        rng: Source of the choice.

    Returns:
        Ascending indices (num_chosen,).
    """
    if not 0 <= num_chosen <= len(labels):
        raise ValueError(f"stratified choice: got {num_chosen} of {len(labels)} examples")
    classes, counts = np.unique(labels, return_counts=True)
    # The sort is stable, so the indices of each class rise.
    members = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts))[:-1]
    exact = counts * (num_chosen / max(1, len(labels)))
    quota = np.floor(exact).astype(np.int64)
    # Break ties between remainders at random: otherwise the first classes would always get the spare places.
    by_remainder = np.lexsort((rng.random(len(classes)), quota - exact))
    quota[by_remainder[: num_chosen - quota.sum()]] += 1
    chosen = [rng.permutation(indices)[:count] for indices, count in zip(members, quota, strict=True)]
    return np.sort(np.concatenate([np.empty(0, np.int64), *chosen]))


def dirichlet_partition(labels: Inputs, num_parts: int, alpha: float, rng: np.random.Generator) -> tuple[Int64s, ...]:
    """Partition examples into non-IID parts of equal size by a Dirichlet distribution.

    Each part draws its mix of labels q ~ Dir(alpha * K * p). Here p is the mix of all labels and K their number, so
    alpha counts per label. With 0.1 a part has one or two labels. With 100 all parts are similar.

    The parts draw examples by turns: a label from q, among the remaining labels, then the next example of that label.
    So every example is in exactly one part, and every part has n // num_parts examples or one more.

    Args:
        labels: Labels (n,).
        num_parts: Number of parts, at most n.
        alpha: Concentration, positive.
        rng: Source of the choice.

    Returns:
        Ascending indices of each part.

    Raises:
        ValueError: There are fewer examples than parts, or alpha is not positive.

    Reference:
        Hsu, Qi and Brown 2019, arXiv 1909.06335, section 2.
    """
    if not 0 < num_parts <= len(labels):
        raise ValueError(
            f"dirichlet partition: got {num_parts} parts of {len(labels)} examples, expected 1 to that many"
        )
    if not 0.0 < alpha < np.inf:
        raise ValueError(f"dirichlet partition: got alpha {alpha}, expected a positive number")
    classes, counts = np.unique(labels, return_counts=True)
    mixes = rng.dirichlet(alpha * len(classes) * counts / len(labels), size=num_parts)  # (parts, classes)
    remaining = [list(rng.permutation(np.flatnonzero(labels == label))) for label in classes]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for turn, chance in enumerate(rng.random(len(labels))):
        part = turn % num_parts
        sizes = np.array([len(rest) for rest in remaining])
        weights = mixes[part] * (sizes > 0)
        if weights.sum() <= 0.0:
            # No label of the part's mix is left: draw from all examples that are left.
            weights = sizes.astype(np.float64)
        bounds = np.cumsum(weights)
        index = int(np.searchsorted(bounds, chance * bounds[-1], side="right"))
        parts[part].append(remaining[index].pop())
    return tuple(np.sort(np.array(part, np.int64)) for part in parts)
