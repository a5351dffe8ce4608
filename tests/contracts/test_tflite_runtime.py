"""Faults that only TFLite files can have: truncation, another Signature, a slot outside of the file."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models import with_artifact
from support.remote_runtime import runtime_of

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.formats import fill_offsets
from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.edge.export.formats.graphs import MODEL_FILE
from fanin.edge.export.formats.tflite.writer import to_tflite
from fanin.edge.export.graph.traced import Traced
from fanin.edge.runtimes.base import Runtime
from fanin.protos.errors import InvalidBundle


@pytest.fixture(params=["litert", "tflite"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    """Each TFLite runtime."""
    return runtime_of(request.param)


@pytest.fixture
def bundle(both_formats: Callable[[str], Bundle]) -> Bundle:
    """A Bundle with a TFLite file."""
    return both_formats("mlp")


@pytest.mark.parametrize("size", [0, 5, 1000, -1000])
def test_a_file_that_is_cut_off_is_refused(runtime: Runtime, bundle: Bundle, size: int) -> None:
    wrong = with_artifact(bundle, MODEL_FILE, bundle.artifact(MODEL_FILE)[:size])
    with pytest.raises(InvalidBundle, match=r"evaluate graph: .*(expected a TFLite file|cut off or damaged)"):
        runtime.open_evaluate(wrong)


def test_a_file_without_the_signature_is_refused(runtime: Runtime, bundle: Bundle) -> None:
    x = torch.ones(2)
    program = torch.export.export(torch.nn.ReLU(), (x,))
    other = to_tflite({"other": Traced(program=program, examples=[x], inputs=["x"], outputs=["y"])}, "App other")
    with pytest.raises(InvalidBundle, match=r"evaluate graph: got signature 'evaluate', expected one of \['other'\]"):
        runtime.open_evaluate(with_artifact(bundle, MODEL_FILE, other))


def test_slots_are_written_at_the_offsets_of_the_manifest() -> None:
    slot = Slot(initializer="b", kind=SlotKind.FLOAT, parameter="b", shape=(2,), offset=3)
    value = np.array([1.0, -2.0], np.float32)
    filled = fill_offsets(bytes(12), [slot], {"b": value}, "graph")
    assert filled == bytes(3) + value.tobytes() + bytes(1)
    for offset in (-1, 5):
        with pytest.raises(InvalidBundle, match="FN-0321"):
            fill_offsets(bytes(12), [replace(slot, offset=offset)], {"b": value}, "graph")
