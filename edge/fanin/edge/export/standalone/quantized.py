"""The ``infer`` and ``preprocess`` graphs of a Bundle as plain files.

A Bundle's ``infer`` graph is empty until a runtime fills its slots. Here the values become a part of the file. The
arithmetic is that of ``bundles.quantize``, so the predictions are those of ``fanin infer`` with the same kernels. On
x86 without VNNI, onnxruntime needs ``session.x64quantprecision`` for kernels that do not saturate.
"""

from typing import Final

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.formats import file_format
from fanin.edge.bundles.quantize import fill_slots
from fanin.edge.ranges import grids_of
from fanin.edge.runtimes.models import PREPROCESS
from fanin.edge.tensors import Float32s
from fanin.protos.errors import InvalidInput

INFER: Final = "infer"


def int8_models(
    bundle: Bundle, parameters: Float32s, graph_format: str, ranges: Float32s | None = None
) -> dict[str, bytes]:
    """Return a file for each int8 ``infer`` graph of a Version, with this graph only, by Signature.

    Args:
        bundle: The Bundle.
        parameters: The Version's parameters (num_values,). Personal parameters have their initial values.
        graph_format: A format of the Bundle.
        ranges: The ranges of the Version (2 * activations,); None for those of the Bundle.

    Raises:
        InvalidInput: The Bundle has no graphs in this format.
        InvalidBundle: The graph or its slots are invalid.
        InvalidVersion: A parameter is not finite, or the ranges are not those of the Bundle's activations.
    """
    check_format(bundle, graph_format)
    singles, lengths = {INFER: bundle}, bundle.manifest.lengths
    if lengths is not None:
        singles = {lengths.signature(INFER, size): bundle.at(size) for size in reversed(lengths.sizes)}
    return {name: _int8_model(single, parameters, graph_format, ranges) for name, single in singles.items()}


def _int8_model(bundle: Bundle, parameters: Float32s, graph_format: str, ranges: Float32s | None) -> bytes:
    manifest, what = bundle.manifest, f"{INFER} graph"
    slots = manifest.slots.get(graph_format, ())
    grids = grids_of(manifest.activations, ranges)
    values = fill_slots(slots, manifest.model_table, bundle.completed(parameters), manifest.derived, grids)
    filled = file_format(graph_format).fill_slots(bundle.graph(INFER, graph_format), slots, values, what)
    return _alone(filled, INFER, graph_format)


def preprocess_model(bundle: Bundle, graph_format: str) -> bytes | None:
    """Return a file with the ``preprocess`` graph; None for a Bundle without one. Raises InvalidBundle."""
    if PREPROCESS not in bundle.manifest.signatures:
        return None
    return _alone(bundle.graph(PREPROCESS, graph_format), PREPROCESS, graph_format)


def check_format(bundle: Bundle, graph_format: str) -> None:
    """Raise InvalidInput unless the Bundle has graphs in a format."""
    formats = bundle.manifest.signatures[INFER].graphs
    if graph_format not in formats:
        raise InvalidInput(
            f"--{graph_format}: the run's bundle has graphs in {sorted(formats)} only, expected also {graph_format!r}; "
            "export the App in this format",
            code="FN-0796",
        )


def _alone(data: bytes, signature: str, graph_format: str) -> bytes:
    """Return a file with one Signature: interpreters run the first graph of a file unless they get a name."""
    if not file_format(graph_format).has_signatures:
        return data
    from ai_edge_litert import schema_py_generated as schema

    from fanin.edge.export.formats.tflite.file import only, pack, tidy

    model = schema.ModelT.InitFromPackedBuf(only(schema.ModelT.InitFromPackedBuf(data), signature))
    tidy(model)
    return pack(model)
