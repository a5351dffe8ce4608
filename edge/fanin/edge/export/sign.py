"""The export: an App becomes a signed Bundle. The folder is written last, so a failure leaves nothing behind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fanin.edge.bundles.bundle import Bundle, open_folder, write_bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.export.app.app import App
from fanin.edge.export.build import LOG, build
from fanin.edge.export.diagnosis.parts import FormatFailure
from fanin.edge.export.formats.graphs import FORMATS
from fanin.edge.export.verification.ready import check_arguments
from fanin.edge.files import new_folder
from fanin.edge.runtimes.quality import Agreement, Quality
from fanin.protos.errors import UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A Bundle, and the findings of its export.

    Attributes:
        bundle: The Bundle.
        notes: Changes to the module, rows that depend on padding, and formats in which int8 is far from float.
        measured: Float against int8 in each graph format, for an App with validation data.
        compared: Float against int8 in each graph format on calibration data, for an App without validation data.
    """

    bundle: Bundle
    notes: tuple[str, ...]
    measured: Mapping[str, Quality]
    compared: Mapping[str, Agreement]


def export(
    app: App,
    folder: Path | str,
    key: SigningKey,
    formats: Sequence[str] = tuple(FORMATS),
    max_drop: float | None = None,
) -> Exported:
    """Export an App as a signed Bundle: trace, quantize, verify against eager torch, sign and write.

    Args:
        app: The App.
        folder: A new or empty folder for the Bundle. It is written only if every step succeeds.
        key: The publisher's key, which signs the manifest.
        formats: Graph formats to write: ``"onnx"``, ``"tflite"``, or both.
        max_drop: Limit on the cost of int8 on the validation data: points of accuracy, or percent of squared error for
            a module that returns values. None: the defaults of ``check_drop``. ``math.inf``: no limit.

    Returns:
        The Bundle with notes and measurements.

    Raises:
        UnsupportedModel: The module cannot be trained by a graph, or int8 costs more than ``max_drop``. The message
            names the part of the module and a remedy.
        InvalidInput: ``folder`` holds files or is no path, ``app`` is no App, a format is unknown, or ``max_drop`` is
            not a number of at least 0. All of them are checked first.
    """
    path = new_folder("export: folder", folder)
    check_arguments("export", app, formats, max_drop)
    draft = build(app, formats, max_drop, _refuse)
    assert draft is not None, "a format without graphs ends the export"
    LOG.info("writing the bundle")
    # Another export may have written there in the meantime.
    write_bundle(new_folder("export: folder", path), draft.manifest, draft.artifacts, key)
    return Exported(
        bundle=open_folder(path, trusted=[key.public]),
        notes=draft.notes,
        measured=draft.measured,
        compared=draft.compared,
    )


def _refuse(failure: FormatFailure) -> None:
    raise UnsupportedModel(failure.reason)
