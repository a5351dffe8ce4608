"""Configuration of a training job, in TOML, and all checks that need no process.

    [model] [model.layout] and one table for a family, such as [model.decoder] or [model.pretrained]
    [data] [training] [stop] [evaluation] [rate] [parallel] [communication]
    [checkpoints] [watch], and at the top level: seed

The keys of a table are the fields of its record (``settings``); a field with a default may be omitted. Invariant: a
TrainConfig that exists is consistent. ``check_config`` also checks it against a number of processes, before any of them
starts.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fanin.datacenter.config.communication import (
    CommunicationSettings,
    check_checkpointable,
    check_communication,
    check_skips,
    check_traffic,
)
from fanin.datacenter.config.rates import RateSettings, check_rate
from fanin.datacenter.config.records import record_of
from fanin.datacenter.config.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    StopSettings,
    WatchSettings,
)
from fanin.datacenter.models.pretrained import PretrainedSettings
from fanin.datacenter.models.pretrained_folder import ONE_FILE, weights_in
from fanin.datacenter.parallel.checks import check_job, check_sequence
from fanin.datacenter.parallel.layout import Layout
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.watch.sinks import check_tensorboard
from fanin.protos.errors import InvalidInput

ConfigTables = Mapping[str, Mapping[str, object]]
NO_OVERRIDES: Final[ConfigTables] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The configuration of a job. Two configs that differ only in ``parallel`` train the same model."""

    model: ModelSettings
    data: DataSettings
    training: TrainingSettings
    stop: StopSettings
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    rate: RateSettings = field(default_factory=RateSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    communication: CommunicationSettings = field(default_factory=CommunicationSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    watch: WatchSettings = field(default_factory=WatchSettings)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 64:
            raise InvalidInput(f"training: got seed {self.seed}, expected 0 to 2^64 - 1", code="FN-1240")
        if self.evaluation.keep == "best" and (self.checkpoints.folder or self.checkpoints.resume):
            raise InvalidInput(
                "evaluation: got keep 'best' and a folder of checkpoints, expected keep 'last': a checkpoint has one "
                "set of values; set keep = 'last', or omit [checkpoints]",
                code="FN-1246",
            )
        folder, weights = _folder(self.model), self.checkpoints.weights
        if folder is not None and weights is not None:
            _check_export(folder, weights)
        _check_precision(self.model, self.parallel)
        check_communication(self.communication, self.parallel, (self.evaluation.every, self.checkpoints.every))
        check_checkpointable(self.communication, self.checkpoints.folder)
        check_traffic(self.communication, counted=self.watch.traffic)
        check_skips(self.communication, self.training.max_skips, self.parallel.precision)
        check_rate(self.rate, self.training, self.parallel, plain=self.communication.plain)

    @property
    def evaluation_size(self) -> int:
        """Samples in an evaluation's batch over all ranks."""
        num_accumulated = self.training.accumulate if self.parallel.folded else 1
        return self.evaluation.batch_size or self.training.batch_size // num_accumulated

    def fitted(self, num_processes: int) -> "TrainConfig":
        """Return the same job with its mesh fitted to another number of processes. Its global batch stays the same."""
        mesh = self.parallel.mesh.fit(num_processes)
        return replace(self, parallel=replace(self.parallel, mesh=mesh))


def parse_config(text: str, where: str, overrides: ConfigTables = NO_OVERRIDES) -> TrainConfig:
    """Return the config in a TOML text.

    Args:
        text: The text.
        where: Name of its source, for errors.
        overrides: Values by table and key that replace those of the text.

    Raises:
        InvalidInput: The text is not valid TOML, or its values are not a valid config.
    """
    try:
        row = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise InvalidInput(f"{where}: not TOML ({exc})", code="FN-1201") from exc
    for table, values in overrides.items():
        if isinstance(row.setdefault(table, {}), dict):
            row[table] |= values
    return record_of(TrainConfig, row, where)


def read_train_config(path: Path, overrides: ConfigTables = NO_OVERRIDES) -> TrainConfig:
    """Return the config in a TOML file; see ``parse_config``. Raises InvalidInput."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidInput(f"{path}: cannot be read ({exc})", code="FN-1201") from exc
    return parse_config(text, str(path), overrides)


def check_config(config: TrainConfig, num_processes: int) -> None:
    """Check that ``num_processes`` processes can run a job.

    Raises:
        InvalidInput: They cannot; the message has all numbers involved.
        RuntimeMissing: The job needs a library that is not installed.
    """
    if num_processes < 1:
        raise InvalidInput(f"datacenter job: got {num_processes} processes, expected at least 1", code="FN-1202")
    mesh, folder, initial = config.parallel.mesh, _folder(config.model), config.model.initial
    if folder is not None and initial is not None and weights_in(folder):
        raise InvalidInput(
            f"model: got initial {initial} and weights in {folder}, expected one of them; leave initial "
            "out, or take a folder that has config.json alone",
            code="FN-1224",
        )
    if config.model.app and config.model.layout is None and mesh.pp * mesh.tp > 1:
        raise InvalidInput(
            f"mesh {mesh}: got pp {mesh.pp} and tp {mesh.tp} for the App {config.model.app}, whose module cannot be "
            "cut or split without names; take dp_replicate and dp_shard, or give [model.layout]",
            code="FN-1268",
        )
    layout = config.model.parallel_layout
    if config.model.family is not None:
        _check_axes(f"family {config.model.family.name!r}", layout, mesh, "the family's layout")
    elif config.model.layout is not None:
        _check_axes(f"App {config.model.app}", layout, mesh, "[model.layout]")
    check_job(layout, config.parallel, config.training, num_processes)
    if config.data.windows:
        check_sequence(config.parallel, config.data.length)
    check_tokens(config)
    _check_evaluation(config)
    if config.watch.tensorboard:
        check_tensorboard()


def _check_axes(what: str, layout: Layout, mesh: MeshShape, where: str) -> None:
    """Raise InvalidInput if the mesh has an axis that the layout of a family or an App does not describe."""
    others = "take dp_replicate and dp_shard, or add"
    if mesh.tp > 1 and "tp" not in layout.unfit and not any(style != "whole" for style in layout.plan.values()):
        raise InvalidInput(
            f"mesh {mesh}: got tp {mesh.tp} for the {what}, whose layout has no plan that splits its modules "
            f"over tp; {others} a plan to {where}",
            code="FN-1268",
        )
    if mesh.pp > 1 and "pp" not in layout.unfit and not layout.layers:
        raise InvalidInput(
            f"mesh {mesh}: got pp {mesh.pp} for the {what}, whose layout names no list of layers to cut for "
            f"pp; {others} the list to {where}",
            code="FN-1268",
        )


def check_tokens(config: TrainConfig) -> None:
    """Raise InvalidInput unless a family's model can read the windows of the data."""
    data, family = config.data, config.model.family
    tokens = None if family is None else family.tokens
    if data.mask_token is not None and not (tokens is not None and tokens.masked and data.windows):
        raise InvalidInput(
            f"data: got mask_token {data.mask_token}, expected none: it hides tokens of a text from an encoder or a "
            "masked model",
            code="FN-1237",
        )
    if family is None or tokens is None or not data.windows:
        return
    if tokens.positions is not None and data.length > tokens.positions:
        raise InvalidInput(
            f"data: got length {data.length}, expected at most the model's {tokens.positions} positions "
            f"([model.{family.name}])",
            code="FN-1235",
        )
    if tokens.own_mask and data.mask_token is None:
        raise InvalidInput(
            f"data: got no mask_token for [model.{family.name}] with weights, expected the id that its tokenizer gives "
            "the mask; without weights the token after the data's last one is the mask",
            code="FN-1237",
        )


def check_fitted(config: TrainConfig, num_processes: int) -> None:
    """Check that another number of processes can run a job with a fitted mesh. Raises InvalidInput."""
    mesh = config.parallel.mesh
    is_same = mesh.fit(num_processes) == mesh
    try:
        check_config(config.fitted(num_processes), num_processes)
    except InvalidInput as exc:
        if is_same:
            raise
        raise InvalidInput(
            f"{exc}; this is mesh {mesh} fitted to {num_processes} processes: take a batch that can be divided among "
            "every number of machines, or other numbers of them",
            code=exc.code,
        ) from exc


def _folder(model: ModelSettings) -> Path | None:
    """Return the source folder of a pretrained model."""
    config = None if model.family is None else model.family.config
    return config.folder if isinstance(config, PretrainedSettings) else None


def _check_precision(model: ModelSettings, parallel: ParallelSettings) -> None:
    """Raise InvalidInput unless a pretrained model in double precision has float64 as its dtype.

    The config that is written next to its weights names that dtype.
    """
    config = None if model.family is None else model.family.config
    if parallel.precision == "double" and isinstance(config, PretrainedSettings) and config.dtype != "float64":
        raise InvalidInput(
            f"parallel: got precision 'double' and dtype {config.dtype!r} in [model.pretrained], expected dtype "
            "'float64'; set it, or use precision 'full'",
            code="FN-1222",
        )


def _check_export(folder: Path, weights: Path) -> None:
    """Raise InvalidInput unless the exported weights of a pretrained model form a new folder of the same kind."""
    try:
        same = weights.parent.resolve() == folder.resolve()
    except (OSError, RuntimeError, ValueError) as exc:
        raise InvalidInput(
            f"checkpoints: got weights {weights}, expected the path of a file ({exc})", code="FN-1223"
        ) from exc
    if same:
        raise InvalidInput(
            f"checkpoints: got weights {weights} in the folder that the model comes from, expected another folder: "
            "a config.json is written next to them; name a file in another folder",
            code="FN-1223",
        )
    if weights.name != ONE_FILE:
        raise InvalidInput(
            f"checkpoints: got weights {weights} of a model of transformers, expected the name {ONE_FILE}, by which "
            "from_pretrained finds them",
            code="FN-1223",
        )


def _check_evaluation(config: TrainConfig) -> None:
    """Raise InvalidInput unless an evaluation's batch divides evenly and has the shape a folded schedule expects."""
    mesh, num_accumulated = config.parallel.mesh, config.training.accumulate
    size, pieces = config.evaluation.batch_size, mesh.num_parts * config.parallel.microbatches
    if size % pieces:
        raise InvalidInput(
            f"evaluation: got batch_size {size}, expected a multiple of {mesh.num_parts} parts x "
            f"{config.parallel.microbatches} microbatches = {pieces}",
            code="FN-1245",
        )
    if config.parallel.folded and config.evaluation_size * num_accumulated != config.training.batch_size:
        raise InvalidInput(
            f"evaluation: got batch_size {size} and schedule {config.parallel.schedule}, expected "
            f"{config.training.batch_size // num_accumulated} (batch_size {config.training.batch_size} of [training] / "
            f"{num_accumulated} gradient accumulation steps): the schedule needs batches of one size; omit batch_size, "
            "or choose another schedule",
            code="FN-1245",
        )
