"""The operators that every TFLite runtime has: built-in, without state and without random numbers.

The converter may also write an operator whose inputs do not fit each other. ``check_runs`` finds it.

One file serves LiteRT and tflite-runtime 2.14 (2023, the last release for armv7), so the older runtime decides. The
table was measured: for each operator and version, a file that names only this one was loaded in it.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from fanin.edge.export.refusals import Unconverted, first_line

if TYPE_CHECKING:
    from ai_edge_litert import schema_py_generated as schema

_BY_LATEST_VERSION: Final = {
    1: "ADD_N ATAN2 BITCAST BITWISE_XOR BROADCAST_ARGS CEIL COS CUMSUM DYNAMIC_UPDATE_SLICE ELU EXPAND_DIMS FLOOR "
    "HARD_SWISH L2_POOL_2D LOG LOGICAL_AND LOGICAL_NOT LOGICAL_OR MATRIX_DIAG MATRIX_SET_DIAG NEG ONE_HOT POW PRELU "
    "RANK REDUCE_ALL REDUCE_ANY RELU_0_TO_1 RELU_N1_TO_1 RESHAPE RIGHT_SHIFT ROUND SCATTER_ND SEGMENT_SUM SHAPE SIN "
    "SQRT SQUARE UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_SUM ZEROS_LIKE",
    2: "DEPTH_TO_SPACE DIV EXP FLOOR_MOD GELU GREATER L2_NORMALIZATION LEAKY_RELU LESS_EQUAL LOG_SOFTMAX RANGE "
    "REDUCE_PROD RSQRT SELECT_V2 SIGN SPACE_TO_DEPTH SPLIT_V SQUARED_DIFFERENCE SQUEEZE SUM",
    3: "ARG_MAX ARG_MIN AVERAGE_POOL_2D BROADCAST_TO EMBEDDING_LOOKUP FLOOR_DIV GREATER_EQUAL LESS LOGISTIC "
    "MAX_POOL_2D MEAN MIRROR_PAD NOT_EQUAL QUANTIZE REDUCE_MAX REDUCE_MIN RELU RELU6 REVERSE_V2 SOFTMAX TANH TILE "
    "TOPK_V2",
    4: "BATCH_MATMUL BATCH_TO_SPACE_ND CONCATENATION EQUAL FILL GATHER_ND MAXIMUM MINIMUM PACK PAD PADV2 "
    "RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR SELECT SPACE_TO_BATCH_ND SPLIT TRANSPOSE_CONV UNPACK",
    5: "ABS ADD CAST DEQUANTIZE SUB",
    6: "GATHER SLICE TRANSPOSE",
    7: "CONV_2D DEPTHWISE_CONV_2D MUL",
    8: "STRIDED_SLICE",
    10: "FULLY_CONNECTED",
}
LATEST: Final[Mapping[str, int]] = MappingProxyType(
    {name: version for version, names in _BY_LATEST_VERSION.items() for name in names.split()}
)
"""The latest version of each operator in tflite-runtime 2.14."""


def check_operators(used: Iterable[tuple[str, int]], what: str) -> None:
    """Raise UnsupportedModel if a runtime lacks one of these operators (name, version)."""
    lacking = sorted(f"{name} (version {version})" for name, version in used if version > LATEST.get(name, 0))
    if lacking:
        raise Unconverted(f"{what}: needs the operators {lacking}, which not every TFLite runtime has", code="FN-0783")


def check_runs(model: "schema.ModelT", what: str) -> None:
    """Raise UnsupportedModel if a Signature of a file has operators whose inputs do not fit each other.

    Args:
        model: The file.
        what: Prefix of the error message.
    """
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    from fanin.edge.export.formats.tflite.file import only

    for row in model.signatureDefs:
        name = row.signatureKey.decode()
        try:
            Interpreter(
                model_content=only(model, name),
                num_threads=1,
                experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
            ).allocate_tensors()
        except (RuntimeError, ValueError) as exc:
            raise Unconverted(
                f"{what}: the converter wrote a {name} graph for TFLite that does not run ({first_line(exc)})",
                code="FN-0784",
            ) from exc
