"""Publication into a Run: parameters trained in the datacenter become the Run's next Version.

The datacenter is a participant like any other. It downloads the newest Version from the coordinator, trains, and
publishes a Version that is signed by the Bundle's publisher. Devices verify it by the same rule as the Bundle.
"""

import logging
from collections.abc import Callable

from fanin.clients.operator import Operator, next_version
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.versions import check_version
from fanin.edge.runtimes.quality import Quality, check_drop
from fanin.edge.tensors import Float32s
from fanin.protos.chunks import short
from fanin.protos.errors import Conflict
from fanin.protos.messages import UNSEEN, RunInfo

LOG = logging.getLogger("fanin.datacenter")


def train_and_publish(
    operator: Operator,
    run_id: str,
    bundle: Bundle,
    publisher: SigningKey,
    train: Callable[[Float32s], Float32s],
) -> Callable[[int], RunInfo]:
    """Train from a Run's newest Version, and return a function that publishes the result.

    The two steps are separate so that a caller can inspect the result before it publishes.

    Args:
        operator: Connection to the coordinator.
        run_id: The Run.
        bundle: The Run's Bundle.
        publisher: Signing key of the Bundle's publisher.
        train: Maps all parameters of the graphs (num_model_values,) to trained ones. Personal parameters have their
            initial values and are not published.

    Returns:
        A function that publishes the Version for a number of Rounds. It raises Conflict if the Run then has a newer
        Version.

    Raises:
        Conflict: The Run uses another Bundle.
        InvalidVersion: The Version's signature or digests do not verify.
    """
    parent = operator.version(run_id).version
    if parent.bundle_sha256 != bundle.sha256:
        raise Conflict(
            f"run {run_id}: got bundle {short(bundle.sha256)}, expected the run's own, {short(parent.bundle_sha256)}; "
            f"fanin fetch {run_id} --bundle downloads it"
        )
    check_version(parent, run_id=run_id, bundle_sha256=bundle.sha256, publisher=bundle.signed.public_key, seen=UNSEEN)
    trained, _ = bundle.manifest.split(train(bundle.completed(operator.parameters(parent))))
    version, data = next_version(parent, trained, bundle, publisher)
    return lambda num_rounds: operator.publish_version(version, data, num_rounds)


def with_drop_check(
    train: Callable[[Float32s], Float32s],
    measure: Callable[[Float32s], Quality],
    max_drop: float | None = None,
) -> Callable[[Float32s], Float32s]:
    """Return ``train`` with a check of its result.

    The returned function raises InvalidVersion if int8 loses more accuracy than ``max_drop`` (see ``check_drop``). It
    logs a drop that the sample cannot judge.
    """

    def train_and_measure(parameters: Float32s) -> Float32s:
        trained = train(parameters)
        if note := check_drop("the version that was trained", measure(trained), max_drop):
            LOG.warning("%s", note)
        return trained

    return train_and_measure
