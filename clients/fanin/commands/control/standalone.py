"""The files of ``fanin fetch --onnx`` and ``--tflite``: a Version as a model that runs without fanin.

    FILE.onnx               x -> logits
    FILE@16.onnx            the same for a shorter length, if the Bundle has several; FILE.onnx has the longest
    FILE.preprocess.onnx    raw -> x, for a Bundle with ``preprocess``

The model is the int8 graph of the Bundle with its slots filled. With an App it is the float model, traced from the App:
a Bundle has no float graph that predicts without labels. The export room is imported on first use, so ``fanin fetch``
alone needs neither torch nor onnx.
"""

from collections.abc import Mapping
from pathlib import Path

from fanin.clients.versions import FetchedVersion
from fanin.edge.bundles.formats import file_format
from fanin.protos.errors import InvalidInput


def check_targets(files: Mapping[str, Path], app: str) -> None:
    """Raise InvalidInput unless an App has files to write, and files have the extensions of their formats."""
    if app and not files:
        raise InvalidInput(
            f"--app: got {app} without a file, expected also --onnx FILE or --tflite FILE", code="FN-1004"
        )
    for graph_format, path in files.items():
        if path.suffix != file_format(graph_format).suffix:
            raise InvalidInput(
                f"--{graph_format}: got {path}, expected a file that ends in {file_format(graph_format).suffix}",
                code="FN-1006",
            )


def precision_of(app: str) -> tuple[str, str]:
    """Return the name of the model's precision for JSON, and a line about the model.

    Args:
        app: The App of the float model; "" for the int8 model.
    """
    if app:
        return "float32", f"the model is the float one, traced from {app}"
    return "int8", "the model is the int8 one of the bundle; --app APP, with the App of the run, writes the float one"


def standalone_models(fetched: FetchedVersion, files: Mapping[str, Path], app: str) -> dict[Path, bytes]:
    """Return the content of each file.

    Args:
        fetched: The Version.
        files: The target by graph format.
        app: The App of the float model; "" for the int8 model.

    Raises:
        InvalidInput: The Bundle lacks a format, or the App is not its own.
        UnsupportedModel: The App does not load, or its float model differs from torch.
    """
    if not files:
        return {}
    from fanin.edge.export.standalone.quantized import INFER, int8_models, preprocess_model

    bundle, parameters = fetched.bundle, fetched.parameters
    if app:
        from fanin.edge.export import load_app
        from fanin.edge.export.standalone.floats import float_models

        loaded = load_app(app)
        models = {name: float_models(loaded, bundle, parameters, name) for name in files}
    else:
        models = {name: int8_models(bundle, parameters, name, fetched.ranges) for name in files}
    contents = {}
    for name, path in files.items():
        for signature, data in models[name].items():
            contents[path.with_stem(path.stem + signature.removeprefix(INFER))] = data
        preprocess = preprocess_model(bundle, name)
        if preprocess is not None:
            contents[path.with_suffix(f".preprocess{path.suffix}")] = preprocess
    return contents
