"""What the test digits say of a set of parameters: in float, and as the int8 model that devices serve."""

from dataclasses import dataclass

import numpy as np

from fanin.clients.data import Examples, batches_in_order
from fanin.edge.bundle import Bundle
from fanin.edge.runtimes.base import Runtime
from fanin.edge.tensors import Float32s


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Top-1 accuracy in float and int8, and the share of examples on which the two choose the same class."""

    top1_float: float
    top1_int8: float
    agreement: float


def measure(runtime: Runtime, bundle: Bundle, parameters: Float32s, test: Examples) -> Measured:
    """Both forms of one model on the same examples."""
    evaluate = runtime.open_evaluate(bundle)
    in_float = np.concatenate(
        [
            evaluate(parameters, batch).predicted[batch.mask > 0]
            for batch in batches_in_order(test, bundle.manifest.batch_size)
        ]
    )
    in_int8 = runtime.open_predict(bundle, parameters)(test.x).argmax(axis=1)
    return Measured(
        top1_float=float((in_float == test.y).mean()),
        top1_int8=float((in_int8 == test.y).mean()),
        agreement=float((in_float == in_int8).mean()),
    )
