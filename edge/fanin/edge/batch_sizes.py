"""Several batch sizes of one Bundle: a train graph for each, with one set of parameters.

A graph has fixed shapes. The Plan chooses among the batch sizes that the App names (``[training] batch_size``). Each
has a train graph. ``evaluate`` and ``infer`` have one graph, because their results do not depend on the batch.
"""

from collections.abc import Sequence
from typing import Final

from fanin.protos.errors import InvalidInput

MAX_OTHER: Final = 3
"""Each batch size has its own train graph, which takes seconds of an export."""


def check_other_sizes(own: int, others: Sequence[int]) -> None:
    """Raise InvalidInput unless these are batch sizes that a Bundle may have besides its own one."""
    are_sizes = all(type(size) is int and size >= 1 for size in others)
    if not are_sizes or len({own, *others}) <= len(others) or len(others) > MAX_OTHER:
        raise InvalidInput(
            f"other_batch_sizes: got {list(others)} with batch_size {own}, expected at most {MAX_OTHER} different "
            "integers of at least 1, without batch_size",
            code="FN-0395",
        )


def with_batch(signature: str, size: int) -> str:
    """Return the name of a train Signature for another batch size, such as ``train@b8`` or ``train@16@b8``."""
    return f"{signature}@b{size}"
