"""A manifest with one element of every kind, and the bytes that it names."""

from types import MappingProxyType
from typing import Final

import numpy as np

from fanin.edge.bundles.derived import Derived, FoldedTensor
from fanin.edge.bundles.manifest import Manifest, OptimizerSetting
from fanin.edge.bundles.slots import Slot, SlotKind
from fanin.edge.ranges import Activation
from fanin.edge.signatures import Port, Signature
from fanin.edge.tensors import TensorTable, encode_parameters
from fanin.protos.chunks import artifact_of
from fanin.protos.roles import RoleKind, TensorRole

TABLE: Final = TensorTable.of({"dense.bias": (3,), "dense.weight": (4, 3), "gain": ()}).with_roles(
    {
        "dense.bias": TensorRole(role=RoleKind.PARAMETER, lowest=-8.0, highest=8.0),
        "gain": TensorRole(role=RoleKind.STATISTIC, lowest=0.0),
    }
)
INITIAL: Final = encode_parameters(TABLE, np.arange(TABLE.num_values, dtype=np.float32) / 8)
ARTIFACTS: Final = MappingProxyType(
    {"evaluate.onnx": b"an evaluate graph", "infer.onnx": b"an infer graph", "initial": INITIAL, "train.onnx": b"train"}
)
DERIVED: Final = Derived(
    constants=MappingProxyType({"spread": np.array([1.0, 0.5, 2.0], "<f4").tobytes()}),
    folded=MappingProxyType(
        {
            "dense.weight:folded": FoldedTensor(
                value="dense.weight", axis=1, gain="dense.bias", variance="spread", epsilon=0.001, mean="", offset=""
            )
        }
    ),
)
FOLDED: Final = Slot(initializer="f", kind=SlotKind.FLOAT, parameter="dense.weight:folded", shape=(4, 3))
ACTIVATION: Final = Activation(name="onnx:hidden", graph_format="onnx", low=-1.5, high=14.4375)
_SCALE: Final = 0.0625


def slots() -> tuple[Slot, ...]:
    """Return one slot of each kind: a dense layer whose weight is transposed in the graph, and a float."""
    weight, bias = "dense.weight", "dense.bias"
    return (
        Slot(initializer="w", kind=SlotKind.WEIGHT, parameter=weight, shape=(3, 4), axis=1, permutation=(1, 0)),
        Slot(initializer="ws", kind=SlotKind.WEIGHT_SCALE, parameter=weight, shape=(3,), axis=1),
        Slot(
            initializer="b",
            kind=SlotKind.BIAS,
            parameter=bias,
            shape=(3,),
            weight=weight,
            axis=1,
            input_scale=_SCALE,
        ),
        Slot(
            initializer="bs",
            kind=SlotKind.BIAS_SCALE,
            parameter=bias,
            shape=(3,),
            weight=weight,
            axis=1,
            input_scale=_SCALE,
        ),
        Slot(initializer="g", kind=SlotKind.FLOAT, parameter="gain", shape=()),
        *(
            Slot(initializer=name, kind=kind, parameter="", shape=(), activation=ACTIVATION.name)
            for name, kind in (
                ("as", SlotKind.ACTIVATION_SCALE),
                ("az", SlotKind.ZERO_POINT),
                ("aw", SlotKind.ZERO_POINT64),
            )
        ),
    )


def manifest() -> Manifest:
    """Return a manifest with one element of every kind."""
    images = Port(name="x", dtype="float32", shape=(-1, 4))
    logits = Port(name="logits", dtype="float32", shape=(-1, 3))
    return Manifest(
        name="digits",
        batch_size=16,
        num_classes=3,
        table=TABLE,
        signatures=MappingProxyType(
            {
                name: Signature(inputs=(images,), outputs=(logits,), graphs=MappingProxyType({"onnx": f"{name}.onnx"}))
                for name in ("evaluate", "infer", "train")
            }
        ),
        slots=MappingProxyType({"onnx": (*slots(), FOLDED)}),
        artifacts=MappingProxyType({name: artifact_of(data) for name, data in ARTIFACTS.items()}),
        initial="initial",
        derived=DERIVED,
        activations=(ACTIVATION,),
        optimizer=MappingProxyType({"momentum": OptimizerSetting(default=0.9, below=1.0)}),
    )
