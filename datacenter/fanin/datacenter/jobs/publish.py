"""Publication into a Run: parameters trained in the datacenter become the Run's next Version.

    parent_version --> training --> values of a job (checkpoints.trained) --> vector_for, check_int8 --> publish_vector

The datacenter is a participant like any other. It downloads the newest Version from the coordinator, trains, and
publishes a Version that is signed by the Bundle's publisher. Devices verify it by the same rule as the Bundle.
"""

import logging

import numpy as np

from fanin.clients.data.batching import batches_in_order
from fanin.clients.data.examples import Examples, model_examples
from fanin.clients.operator import Operator
from fanin.clients.versions import FetchedVersion, fetch_version, next_version
from fanin.datacenter.checkpoints.trained import TrainedValues
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest import Manifest
from fanin.edge.runtimes.base import Runtime, VersionValues
from fanin.edge.runtimes.measure import measure
from fanin.edge.runtimes.quality import Quality, check_drop
from fanin.edge.tensors import Float32s, count_differences
from fanin.protos.chunks import short
from fanin.protos.errors import InvalidInput, InvalidVersion
from fanin.protos.messages import RunInfo
from fanin.protos.texts import counted

LOG = logging.getLogger("fanin.datacenter")


def parent_version(operator: Operator, run_id: str, publisher: SigningKey) -> FetchedVersion:
    """Download and verify a Run's newest Version, on which the publisher of the Run's Bundle builds the next one.

    Raises:
        InvalidVersion: Another key signed the Bundle, or the Version does not verify.
        NotFound: There is no such Run.
    """
    parent = fetch_version(operator, run_id, None, "")
    signer = parent.bundle.signed.public_key
    if signer != publisher.public:
        raise InvalidVersion(
            f"run {run_id}: got the key {short(publisher.public)}, expected {short(signer)}, which signed the run's "
            "bundle; pass it with --key",
            code="FN-1365",
        )
    return parent


def vector_for(manifest: Manifest, values: TrainedValues) -> Float32s:
    """Return trained values as the parameters of a Version (num_values,), without personal parameters.

    Raises:
        InvalidInput: The values are those of another model, or not finite.
    """
    model = {spec.name: spec.shape for spec in manifest.model_table.specs}
    tensors = values.of_model(model)
    missing = {spec.name for spec in manifest.table.specs} - tensors.keys()
    wrong = {name for name in tensors.keys() & model.keys() if tensors[name].shape != model[name]}
    unknown = tensors.keys() - model.keys()
    if missing or wrong or unknown:
        name = min([*missing, *wrong, *unknown])
        received, expected = (
            list(shape) if shape is not None else "none"
            for shape in (tensors[name].shape if name in tensors else None, model.get(name))
        )
        raise InvalidInput(
            f"{values.source}: got {counted(len(tensors), 'tensor')}: {count_differences(unknown, wrong, missing)}, "
            f"such as {name}: got {received}, expected {expected}; expected the parameters of the run's model "
            f"{manifest.name!r}; name the checkpoints of a job that trains its App, or the job's parameters.bin",
            code="FN-1315",
        )
    flat = manifest.table.flatten({spec.name: tensors[spec.name] for spec in manifest.table.specs})
    if num_broken := int((~np.isfinite(flat)).sum()):
        raise InvalidInput(
            f"{values.source}: got {counted(num_broken, 'value')} that are not finite, expected finite ones; name an "
            "earlier checkpoint",
            code="FN-1312",
        )
    return flat


def measure_version(runtime: Runtime, bundle: Bundle, parameters: Float32s, examples: Examples) -> Quality:
    """Measure a Version in float and as the int8 model that devices serve.

    Args:
        runtime: The runtime that computes both.
        bundle: The Run's Bundle.
        parameters: All parameters of the graphs (num_model_values,).
        examples: The examples to measure on.

    Raises:
        InvalidInput: The examples do not fit the model, or its loss on them is not finite.
    """
    manifest = bundle.manifest
    try:
        ready = model_examples(examples, bundle, runtime)
        version = VersionValues(parameters=parameters)
        return measure(runtime, bundle, version, batches_in_order(ready, manifest.batch_size, manifest.lengths))
    except ValueError as exc:
        raise InvalidInput(
            f"examples: {exc}; pass examples of the run's model {manifest.name!r}", code="FN-1367"
        ) from exc


def check_int8(quality: Quality, max_drop: float | None = None) -> None:
    """Raise InvalidVersion if int8 loses more than ``max_drop`` (see ``check_drop``). Log a drop that is uncertain."""
    if note := check_drop("the version that was trained", quality, max_drop):
        LOG.warning("%s", note)


def publish_vector(
    operator: Operator, parent: FetchedVersion, vector: Float32s, publisher: SigningKey, num_rounds: int
) -> RunInfo:
    """Sign the Version after ``parent``, publish it, and run a number of Rounds from it.

    Args:
        operator: Connection to the coordinator.
        parent: The Run's newest Version.
        vector: The parameters (num_values,), without personal ones.
        publisher: Signing key of the Bundle's publisher.
        num_rounds: Rounds to run; 0 for none.

    Raises:
        Conflict: The Run is running, or has a newer Version.
    """
    version, data = next_version(parent.version, vector, parent.bundle, publisher)
    return operator.publish_version(version, data, num_rounds)
