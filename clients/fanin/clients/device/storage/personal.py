"""Personal parameters on a device, or its copy under Ditto, around a training, and the model that it has fine-tuned.

They are stored after each training, before the header of its Update, so there is no Update without them. A training
continues from those of the Run's last training, even if its Round published no Version: no Version contains them, so
nothing must be undone. A training that is repeated after a crash uses the parameters of an earlier Round than its own,
and so starts from the same ones.

The Bundle's digest is stored with them, so the tensors of another Bundle are never used.

A fine-tuned model has all parameters, and the ranges of its activations. It belongs to the last Version of a Run.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from fanin.clients.device.models import OpenedModel, keeps_copy, own_table
from fanin.clients.device.storage.protocols import StoredStates
from fanin.clients.device.storage.states import StateLabel
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.codecs.pipeline import States
from fanin.edge.ranges import initial_ranges
from fanin.edge.tensors import Float32s
from fanin.protos import messages as m
from fanin.protos.errors import Corrupted, InvalidInput, NotFound

LOG = logging.getLogger("fanin.clients")
RANGES_STATE: Final = "ranges"


def local_values(stored: StoredStates, bundle: Bundle, run_id: str, before: int | None = None) -> Float32s | None:
    """Return the newest personal parameters of a Run (num_local_values,).

    Unusable parameters are logged, and the next older ones are used.

    Args:
        stored: The store of personal parameters.
        bundle: The Run's Bundle.
        run_id: The Run.
        before: The Round that is about to be trained; None for the newest of all.

    Returns:
        The values. None if the device has none yet: it uses the Bundle's initial values, or with Ditto the Version.
    """
    table = own_table(bundle)
    first = _states_of(bundle, np.zeros(table.num_values, np.float32))
    for number in reversed(stored.rounds(run_id)):
        if before is not None and number >= before:
            continue
        try:
            states = stored.get(_label(run_id, number), first)
        except (NotFound, Corrupted) as exc:
            LOG.warning("personal parameters: %s; older ones are used, or the initial ones of the bundle", exc)
            continue
        return table.flatten(states[bundle.sha256])
    return None


def keep_local(stored: StoredStates, bundle: Bundle, assignment: m.Assignment, values: Float32s | None) -> None:
    """Store the personal parameters after a training. They are durable before this returns.

    Args:
        stored: The store of personal parameters.
        bundle: The Run's Bundle.
        assignment: The Assignment of the training.
        values: Their values (num_local_values,), ``Change.local``.

    Raises:
        InvalidInput: The trainer returned none, or others than the Bundle's, or no copy in a Run with Ditto.
        ValueError: A value is not finite.
        StorageFull: The disk is full.
    """
    has_own = bundle.manifest.local is not None or keeps_copy(bundle, assignment.training)
    if not has_own and values is None:
        return
    expected = own_table(bundle).num_values if has_own else 0
    if not has_own or values is None or values.dtype != np.float32 or values.shape != (expected,):
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
    if rounds := stored.rounds(assignment.run_id):
        earlier = [number for number in rounds if number < assignment.round]
        stored.keep(assignment.run_id, (*earlier[-1:], assignment.round))


def tuned_model(stored: StoredStates, version: m.Version, model: OpenedModel) -> OpenedModel | None:
    """Return the model that this device has fine-tuned from a Version; None if there is none.

    A damaged one is logged and removed, so that the device fine-tunes again.

    Args:
        stored: The store of fine-tuned models.
        version: The Version.
        model: Its model.
    """
    label = _tuned_label(version)
    if label.round not in stored.rounds(label.run_id):
        return None
    try:
        states = stored.get(label, _tuned_states(model))
        parameters, local = model.bundle.manifest.split(_flat(states[model.bundle.sha256], model))
    except (NotFound, Corrupted) as exc:
        LOG.warning("fine-tuned model: %s; the version itself is used, and fine-tuned again", exc)
        stored.keep(label.run_id, ())
        return None
    ranges = states[RANGES_STATE][RANGES_STATE] if model.bundle.manifest.activations else None
    return replace(
        model, parameters=parameters, local=None if model.bundle.manifest.local is None else local, ranges=ranges
    )


def keep_tuned(stored: StoredStates, version: m.Version, model: OpenedModel) -> None:
    """Store a fine-tuned model instead of that of an earlier Version. It is durable before this returns.

    Raises:
        ValueError: A value is not finite.
        StorageFull: The disk is full.
    """
    if not np.isfinite(model.values()).all():
        raise ValueError("the parameters have NaN or infinity, expected finite values; lower the learning rate")
    label = _tuned_label(version)
    stored.put(label, _tuned_states(model))
    stored.keep(label.run_id, (label.round,))


def _tuned_states(model: OpenedModel) -> States:
    """Return the parameters of a model and its ranges in the form in which they are stored."""
    manifest = model.bundle.manifest
    shared, local = manifest.split(model.values())
    views = dict(manifest.table.views(shared))
    if manifest.local is not None:
        views |= manifest.local.table.views(local)
    if not manifest.activations:
        return {model.bundle.sha256: views}
    ranges = initial_ranges(manifest.activations) if model.ranges is None else model.ranges
    return {model.bundle.sha256: views, RANGES_STATE: {RANGES_STATE: ranges}}


def _flat(views: Mapping[str, Float32s], model: OpenedModel) -> Float32s:
    manifest = model.bundle.manifest
    shared = manifest.table.flatten({spec.name: views[spec.name] for spec in manifest.table.specs})
    if manifest.local is None:
        return shared
    names = [spec.name for spec in manifest.local.table.specs]
    return manifest.join(shared, manifest.local.table.flatten({name: views[name] for name in names}))


def _tuned_label(version: m.Version) -> StateLabel:
    return StateLabel(run_id=version.run_id, lineage=version.epoch, round=version.number)


def _states_of(bundle: Bundle, values: Float32s) -> States:
    """Return personal parameters (num_local_values,) in the form in which they are stored."""
    return {bundle.sha256: own_table(bundle).views(values)}


def _label(run_id: str, number: int) -> StateLabel:
    # A rollback or a Version from outside does not end them, so they have no lineage.
    return StateLabel(run_id=run_id, lineage=0, round=number)
