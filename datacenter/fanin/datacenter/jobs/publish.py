"""From the datacenter back into a Run: parameters that were trained here become the Run's next Version.

The datacenter is a participant like any other: it takes the newest Version from the coordinator, and what it
publishes is signed by the Bundle's publisher, so devices trust it by the same rule as the Bundle itself.
"""

from collections.abc import Callable

from fanin.clients.operator import Operator, next_version
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.versions import check_version
from fanin.edge.runtimes.quality import Quality, check_drop
from fanin.edge.tensors import Float32s
from fanin.protos.chunks import short
from fanin.protos.control import RunInfo
from fanin.protos.errors import Conflict


def train_and_publish(
    operator: Operator,
    run_id: str,
    bundle: Bundle,
    publisher: SigningKey,
    train: Callable[[Float32s], Float32s],
) -> Callable[[int], RunInfo]:
    """Train from a Run's newest Version; the returned function publishes the outcome for some Rounds.

    ``train`` maps parameters (num_values,) to parameters (num_values,). Between the two steps a caller can look
    at what came out. Raises Conflict if the Run is of another Bundle, InvalidVersion if the Version does not
    verify; publishing raises Conflict if the Run has moved on meanwhile.
    """
    parent = operator.version(run_id).version
    if parent.bundle_sha256 != bundle.sha256:
        raise Conflict(f"run {run_id}: is of bundle {short(parent.bundle_sha256)}, expected {short(bundle.sha256)}")
    check_version(parent, run_id=run_id, bundle_sha256=bundle.sha256, publisher=bundle.signed.public_key, seen=-1)
    version, data = next_version(parent, train(operator.parameters(parent)), bundle, publisher)
    return lambda num_rounds: operator.publish_version(version, data, num_rounds)


def gated(
    train: Callable[[Float32s], Float32s],
    measure: Callable[[Float32s], Quality],
    max_drop: float | None = None,
) -> Callable[[Float32s], Float32s]:
    """``train``, with its outcome measured before anybody can publish it.

    What it returns raises InvalidVersion if int8 costs more than ``max_drop``, as ``check_drop`` takes it.
    """

    def train_and_measure(parameters: Float32s) -> Float32s:
        following = train(parameters)
        check_drop("the version that was trained", measure(following), max_drop)
        return following

    return train_and_measure
