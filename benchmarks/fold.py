"""The fold of an Update, with shift and weight, compared with numpy's addition.

    python benchmarks/fold.py --json FILE

Both are timed alternately on the same memory. The fold adds one Update of ``fixed32``, in pieces of the spool's size,
to the int64 sum. numpy adds the same int32 values to int64 values (``np.add``).
"""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Final

import numpy as np
import typer

from fanin.commands.bench.harness.report import sampled, write_report
from fanin.commands.bench.harness.site import MegabytesOption, load_of
from fanin.commands.console.terminal import JsonOption, run_command
from fanin.edge.codecs.fixed import CODECS
from fanin.edge.tensors import Int32s, TensorTable
from fanin.protos.chunks import CHUNK_BYTES
from fanin.protos.messages import EXAMPLES
from fanin.server.aggregation import fold as aggregation

GATE: Final = 0.8
WEIGHT: Final = 7 * 256
SHIFT: Final = 3
CODEC: Final = "fixed32"


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    return run_command(fold, argv, "benchmarks/fold.py", "python")


def fold(
    megabytes: MegabytesOption = 64.0,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Number of measurements of each, in turn.")] = 15,
    json: JsonOption = "",
) -> None:
    """Time the fold of one update and numpy's addition of as many integers, in turn."""
    num_values = load_of(1, megabytes, 1).num_values
    table = TensorTable.of({"weights": (num_values,)})
    update = np.random.default_rng(1).integers(-(2**31) + 1, 2**31, num_values, np.int32)
    total = aggregation.begin(table)
    plain = np.zeros(num_values, np.int64)
    ours_s, numpy_s = [], []
    for _ in range(repeats):
        contribution = _contribution(update)
        ours_s.append(_seconds(partial(aggregation.accept, total, table, contribution)))
        numpy_s.append(_seconds(partial(np.add, plain, update, out=plain)))
    # Check that both have computed the sum of the same values.
    if not np.array_equal(total.values, plain * (WEIGHT << SHIFT)):
        raise AssertionError("the fold's sum is not the sum")
    best = min(numpy_s) / min(ours_s)
    row: dict[str, object] = {"model_bytes": update.nbytes, "values": num_values}
    row |= sampled("fold_seconds", ours_s) | sampled("numpy_add_seconds", numpy_s)
    row |= sampled("speed_over_numpy_add", [b / a for a, b in zip(ours_s, numpy_s, strict=True)])
    row |= {"best_speed_over_numpy_add": best, "gate_speed_over_numpy_add": GATE}
    write_report(row, json)


def _contribution(update: Int32s) -> aggregation.Contribution:
    codec = CODECS[CODEC]
    payload = memoryview(update.tobytes())
    cut = [payload[start : start + CHUNK_BYTES] for start in range(0, len(payload), CHUNK_BYTES)]
    return aggregation.Contribution(
        weights=(WEIGHT,),
        fresh_weights=(WEIGHT,),
        shifts=(SHIFT,),
        bits=codec.bits,
        max_shift=SHIFT,
        counts={EXAMPLES: 1},
        pieces=[codec.decode(piece) for piece in cut],
    )


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
