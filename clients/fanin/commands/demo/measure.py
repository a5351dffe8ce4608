"""The accuracy of a set of parameters on the test set, in float and as the int8 model that devices serve."""

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.examples import Examples
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.base import Runtime
from fanin.edge.runtimes.measure import measure
from fanin.edge.runtimes.quality import Quality
from fanin.edge.tensors import Float32s


def measure_test(runtime: Runtime, bundle: Bundle, parameters: Float32s, test: Examples) -> Quality:
    """Measure the float and the int8 form of one model on the same examples."""
    manifest = bundle.manifest
    manifest = bundle.manifest
    return measure(runtime, bundle, parameters, batches_in_order(test, manifest.batch_size, manifest.lengths))
