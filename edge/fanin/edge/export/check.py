"""``check_app``: the export of an App up to the last step, without writing anything.

The check is the export itself (``build.build``), in all of its steps: graphs, runtimes, comparisons with torch, and the
cost of int8. So an App without findings can be exported. Where a format fails, the others are still checked.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from fanin.edge.export.app.app import App
from fanin.edge.export.build import build
from fanin.edge.export.diagnosis.parts import Finding, FormatFailure, finding_of
from fanin.edge.export.refusals import Untraceable
from fanin.edge.export.verification.ready import check_arguments

FIX: Final = "fix the code that the reason names: it fails, or it does not fit the App's own data"


def check_app(app: App, formats: Sequence[str], max_drop: float | None = None) -> tuple[Finding, ...]:
    """Return the parts of an App that cannot be exported to these formats.

    Args:
        app: The App.
        formats: Graph formats, ``"onnx"`` and ``"tflite"``.
        max_drop: Limit on the cost of int8, as for ``export``.

    Returns:
        One finding for each part; empty if the App can be exported.

    Raises:
        UnsupportedModel: The App has an error that affects every format: dtypes, names, or nothing to train.
        InvalidInput: ``app`` is no App, a format is unknown, or ``max_drop`` is not a number of at least 0.
    """
    check_arguments("check_app", app, formats, max_drop)
    failures: list[FormatFailure] = []
    try:
        build(app, formats, max_drop, failures.append)
    except Untraceable as exc:
        return (finding_of(app, "", exc, FIX),)
    findings = [finding for failure in failures for finding in failure.findings]
    able = [name for name in formats if all(finding.graph_format != name for finding in findings)]
    if not able:
        return tuple(findings)
    return tuple(replace(row, advice=_with_other(row, able[0])) for row in findings)


def _with_other(finding: Finding, able: str) -> str:
    """Return the remedy of a finding, with an export to a format that has no findings as an alternative."""
    other = f"export without {' and '.join(finding.runtimes)}: --format {able}"
    return f"{finding.advice}; or {other}" if finding.advice else other
