"""An App becomes a signed Bundle.

The walk: prepare (``prepare``) -> in each graph format trace, convert, quantize and find the slots (``formats``) ->
manifest -> verify against eager torch (``verify``) -> measure int8 against float (on calibration data, where that is
all there is) -> write. The folder is written last: what does not verify leaves nothing behind.
"""

import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from fanin.edge.bundles.bundle import Bundle, open_folder, write_bundle
from fanin.edge.bundles.keys import SigningKey
from fanin.edge.bundles.manifest import Manifest, Signature
from fanin.edge.bundles.manifest_json import dump_manifest
from fanin.edge.export.app import App, check_recipe
from fanin.edge.export.formats import FORMATS, Graphs
from fanin.edge.export.prepare import Prepared, prepare
from fanin.edge.export.preprocess import with_preprocess
from fanin.edge.export.tracing.examples import check_kept, example_batch
from fanin.edge.export.tracing.vocabulary import count_tokens
from fanin.edge.export.verify import verify
from fanin.edge.runtimes.base import PaddedBatch
from fanin.edge.runtimes.measure import compare, measure
from fanin.edge.runtimes.quality import Agreement, Quality, check_drop
from fanin.edge.tensors import Float32s, encode_parameters
from fanin.protos.chunks import artifact_of
from fanin.protos.errors import InvalidBundle, InvalidInput, InvalidVersion, UnsupportedModel

LOG = logging.getLogger("fanin.edge.export")
"""The steps of an export, at INFO: it may take minutes."""
PARAMETERS: Final = "parameters"
COMPARED_SAMPLES: Final = 256
"""More of the calibration data would tell the same, later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A Bundle, and what its maker should know of it.

    ``notes`` say what was changed in the module, and where int8 says something else than float; ``measured`` has float
    against int8 in each graph format where the App has validation data, ``compared`` where it has none.
    """

    bundle: Bundle
    notes: tuple[str, ...]
    measured: Mapping[str, Quality]
    compared: Mapping[str, Agreement]


def export_app(
    app: App,
    folder: Path,
    key: SigningKey,
    formats: Sequence[str] = tuple(FORMATS),
    max_drop: float | None = None,
) -> Exported:
    """Trace, quantize, verify and sign; the Bundle in ``folder``.

    ``formats`` are the graph formats to write, ``max_drop`` what int8 may cost on the App's validation data, as
    ``check_drop`` takes it. Raises UnsupportedModel if the module cannot be trained by a graph, saying which part and
    what to do, or if int8 costs more; InvalidInput for a format that is not known, or a ``max_drop`` that is none.
    """
    if not formats or set(formats) - set(FORMATS):
        raise InvalidInput(f"export: got formats {list(formats)}, expected some of {sorted(FORMATS)}")
    if max_drop is not None and not 0.0 <= max_drop < math.inf:
        raise InvalidInput(f"export: got {max_drop:g} for what int8 may cost, expected a number of at least 0")
    check_recipe(app)
    LOG.info("preparing the module")
    prepared = prepare(app)
    check_kept(prepared)
    made: dict[str, Graphs] = {}
    for name in formats:
        LOG.info("%s: tracing, converting and quantizing", name)
        made[name] = with_preprocess(prepared, name, FORMATS[name].make(prepared))
    manifest, artifacts = _assemble(prepared, made)
    data = dump_manifest(manifest)
    notes, measured, compared = list(prepared.notes), {}, {}
    with tempfile.TemporaryDirectory(prefix="fanin-export-") as draft:
        write_bundle(Path(draft), data, artifacts, key)
        bundle = open_folder(Path(draft), trusted=[key.public])
        for name in formats:
            try:
                runtime = FORMATS[name].runtime()
                LOG.info("%s: verifying against eager torch", name)
                verify(prepared, bundle, runtime, FORMATS[name].plain())
                LOG.info("%s: comparing int8 with float", name)
                if app.validation is not None:
                    found = measure(runtime, bundle, bundle.initial_parameters(), validation_batches(app))
                    check_drop(f"{prepared.what}: {name}", found, max_drop)
                    measured[name] = found
                else:
                    compared[name] = compare(
                        runtime, bundle, bundle.initial_parameters(), calibration_batches(prepared)
                    )
                    notes += _warnings(name, compared[name])
            except (InvalidBundle, InvalidVersion, ValueError) as exc:
                raise UnsupportedModel(f"{prepared.what}: {exc}") from exc
    LOG.info("writing the bundle")
    write_bundle(folder, data, artifacts, key)
    return Exported(
        bundle=open_folder(folder, trusted=[key.public]),
        notes=tuple(notes),
        measured=MappingProxyType(measured),
        compared=MappingProxyType(compared),
    )


def validation_batches(app: App) -> Iterator[PaddedBatch]:
    """The App's validation data in batches of its size, the last one padded and masked."""
    assert app.validation is not None, "only an App with validation data has batches of it"
    x, y = app.validation
    wanted = torch.int32 if app.num_classes else torch.float32
    for at, mask in _places(len(x), app.batch_size):
        yield PaddedBatch(x=x[at].numpy(), y=y[at].to(wanted).numpy(), mask=mask)


def calibration_batches(prepared: Prepared) -> Iterator[PaddedBatch]:
    """Some of the calibration data, as ``validation_batches``; what y holds means nothing."""
    _, y, _ = example_batch(prepared)
    x = prepared.app.calibration[:COMPARED_SAMPLES]
    for at, mask in _places(len(x), prepared.app.batch_size):
        yield PaddedBatch(x=x[at].numpy(), y=y.numpy(), mask=mask)


def _places(num: int, batch_size: int) -> Iterator[tuple[Tensor, Float32s]]:
    """(which samples make a batch, its mask): the last one is padded with its first sample."""
    for start in range(0, num, batch_size):
        at = torch.arange(start, start + batch_size)
        yield torch.where(at < num, at, start), (at < num).float().numpy()


def _warnings(name: str, found: Agreement) -> list[str]:
    advice = (
        "it may have learnt nothing yet, or a few of these examples are far beyond the others; with validation data "
        "in the App the export measures what int8 costs, and quantization_aware lowers it"
    )
    return [] if found.is_good else [f"{name}: {found}, which is far apart for one model: {advice}"]


def _assemble(prepared: Prepared, made: Mapping[str, Graphs]) -> tuple[Manifest, dict[str, bytes]]:
    app, table = prepared.app, prepared.table
    arrays = {name: value.numpy() for name, value in prepared.travelling.items()}
    artifacts = {name: data for graphs in made.values() for name, data in graphs.files.items()}
    artifacts[PARAMETERS] = encode_parameters(table, table.flatten(arrays))
    first = next(iter(made.values()))
    for name, graphs in made.items():
        if graphs.ports != first.ports or graphs.derived != first.derived:
            raise UnsupportedModel(
                f"{prepared.what}: the graphs in {name} have other ports or constants than those in {next(iter(made))}"
            )
    signatures = {
        name: Signature(
            inputs=inputs,
            outputs=outputs,
            graphs=MappingProxyType({key: graphs.signatures[name] for key, graphs in made.items()}),
        )
        for name, (inputs, outputs) in first.ports.items()
    }
    manifest = Manifest(
        name=app.name,
        batch_size=app.batch_size,
        num_classes=app.num_classes,
        num_tokens=count_tokens(prepared),
        table=table,
        signatures=MappingProxyType(signatures),
        slots=MappingProxyType({name: graphs.slots for name, graphs in made.items()}),
        artifacts=MappingProxyType({name: artifact_of(found) for name, found in artifacts.items()}),
        initial=PARAMETERS,
        derived=first.derived,
    )
    return manifest, artifacts
