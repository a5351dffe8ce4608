"""Personal parameters on a device, before and after a training.

They are stored after each training, before the header of its Update, so there is no Update without them. A training
continues from those of the Run's last training, even if its Round published no Version: no Version contains them, so
nothing must be undone. A training that is repeated after a crash uses the parameters of an earlier Round than its own,
and so starts from the same ones.

The Bundle's digest is stored with them, so the tensors of another Bundle are never used.
"""

import logging

import numpy as np

from fanin.clients.device.storage.protocols import StoredStates
from fanin.clients.device.storage.states import StateLabel
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.codecs.pipeline import States
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import Corrupted, InvalidInput, NotFound

LOG = logging.getLogger("fanin.clients")


def local_values(stored: StoredStates, bundle: Bundle, run_id: str, before: int | None = None) -> Float32s | None:
    """Return the newest personal parameters of a Run (num_local_values,).

    Unusable parameters are logged, and the next older ones are used.

    Args:
        stored: The store of personal parameters.
        bundle: The Run's Bundle.
        run_id: The Run.
        before: The Round that is about to be trained; None for the newest of all.

    Returns:
        The values. None if the Bundle has none, or if the device has none yet and uses the Bundle's initial values.
    """
    if bundle.manifest.local is None:
        return None
    first = _states_of(bundle, np.zeros(bundle.manifest.local.table.num_values, np.float32))
    for number in reversed(stored.rounds(run_id)):
        if before is not None and number >= before:
            continue
        try:
            states = stored.get(_label(run_id, number), first)
        except (NotFound, Corrupted) as exc:
            LOG.warning("personal parameters: %s; older ones are used, or the initial ones of the bundle", exc)
            continue
        return bundle.manifest.local.table.flatten(states[bundle.sha256])
    return None


def keep_local(stored: StoredStates, bundle: Bundle, assignment: m.Assignment, values: Float32s | None) -> None:
    """Store the personal parameters after a training. They are durable before this returns.

    Args:
        stored: The store of personal parameters.
        bundle: The Run's Bundle.
        assignment: The Assignment of the training.
        values: Their values (num_local_values,), ``Change.local``.

    Raises:
        InvalidInput: The trainer returned none, or others than the Bundle's.
        ValueError: A value is not finite.
        StorageFull: The disk is full.
    """
    local = bundle.manifest.local
    if local is None and values is None:
        return
    expected = 0 if local is None else local.table.num_values
    if local is None or values is None or values.dtype != np.float32 or values.shape != (expected,):
        received = "none" if values is None else f"{values.dtype} {values.shape}"
        raise InvalidInput(
            f"training: got {received} as personal parameters, expected float32 ({expected},); return them as "
            "Change.local",
            code="FN-0841",
        )
    if not np.isfinite(values).all():
        raise ValueError("personal parameters: got NaN or infinity, expected finite values; lower the learning rate")
    stored.put(_label(assignment.run_id, assignment.round), _states_of(bundle, values))


def trim_local(stored: StoredStates, assignment: m.Assignment) -> None:
    """Remove all personal parameters of a Run but those that a repeated training needs, and the newest."""
    earlier = [number for number in stored.rounds(assignment.run_id) if number < assignment.round]
    stored.keep(assignment.run_id, (*earlier[-1:], assignment.round))


def _states_of(bundle: Bundle, values: Float32s) -> States:
    """Return personal parameters (num_local_values,) in the form in which they are stored."""
    assert bundle.manifest.local is not None, "the caller checks that the Bundle has some"
    return {bundle.sha256: bundle.manifest.local.table.views(values)}


def _label(run_id: str, number: int) -> StateLabel:
    # A rollback or a Version from outside does not end them, so they have no lineage.
    return StateLabel(run_id=run_id, lineage=0, round=number)
