"""A training job as a user writes it, in TOML: frozen records, and everything about them that can be refused at once.

    [model] [model.decoder] [model.encoder] [model.pretrained] [model.layout]
    [data] [training] [stop] [evaluation] [rate] [parallel] [communication]
    [checkpoints] [watch], and at the top: seed

Each key is the name of a field below; what may be left out has a value there. A config that exists makes sense by
itself; ``check_config`` holds it against a number of processes, before one is started.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from fanin.datacenter.jobs.layouts import WHOLE, LayoutSettings
from fanin.datacenter.jobs.records import record_of
from fanin.datacenter.models.decoder import DecoderConfig
from fanin.datacenter.models.encoder import EncoderConfig
from fanin.datacenter.models.pretrained import PretrainedSettings, pretrained_skeleton
from fanin.datacenter.models.pretrained_folder import ONE_FILE, weights_in
from fanin.datacenter.parallel.checks import check_job, check_sequence
from fanin.datacenter.parallel.layout import Layout, decoder_layout, encoder_layout
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.parallel.transformers_layout import pretrained_layout
from fanin.datacenter.training.communication import (
    CommunicationSettings,
    check_communication,
    check_skips,
    check_traffic,
)
from fanin.datacenter.training.rates import RateSettings, check_rate
from fanin.datacenter.watch.meters import check_tensorboard
from fanin.protos.errors import InvalidInput

SAFETENSORS: Final = ".safetensors"
TOKEN_FILES: Final = (".npy", ".npz")
SHAKESPEARE: Final = "tinyshakespeare"
"""The text that is found by its name (FANIN_DATA, a cache, its mirror); any other is a path."""
MAX_HANG_S: Final = 1e6
"""Eleven days: more is no watch, and what waits for it in C++ knows no much larger number."""
Tables = Mapping[str, Mapping[str, object]]
NOTHING: Final[Tables] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What is trained: an App (``package.module:name`` or ``path/to/file.py:name``), a decoder or an encoder of these
    sizes, or a causal or masked language model of ``transformers`` out of its folder.

    ``mean_over``: what the loss is a mean of; an App's own loss is one of samples. ``initial``: what to begin with, a
    file of canonical parameters as a Version has them, or of all weights as ``.safetensors``.
    """

    app: str = ""
    decoder: DecoderConfig | None = None
    encoder: EncoderConfig | None = None
    pretrained: PretrainedSettings | None = None
    layout: LayoutSettings | None = None
    mean_over: Literal["", "tokens", "samples"] = ""
    initial: Path | None = None

    def __post_init__(self) -> None:
        kinds = ("app", "decoder", "encoder", "pretrained")
        given = [kind for kind in kinds if getattr(self, kind)]
        if len(given) != 1:
            raise InvalidInput(f"model: got {' and '.join(given) or 'nothing'}, expected one of {', '.join(kinds)}")
        if not self.app and self.layout is not None:
            raise InvalidInput(f"model: got a layout beside {given[0]}, expected it for an App alone")
        if self.app and self.mean_over == "tokens":
            raise InvalidInput("model: got mean_over 'tokens' for an App, expected 'samples': so its loss is made")

    @property
    def parallel_layout(self) -> Layout:
        """What the parallel rooms know of it.

        Of a folder it is asked: that raises InvalidInput, or RuntimeMissing where ``transformers`` is not installed.
        """
        if self.decoder is not None:
            return decoder_layout(self.decoder)
        if self.encoder is not None:
            return encoder_layout(self.encoder)
        if self.pretrained is not None:
            return pretrained_layout(pretrained_skeleton(self.pretrained))
        return WHOLE if self.layout is None else self.layout.layout


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """What it is trained on: ``text``, a file of characters in windows of ``length``, ``tokens``, an .npy or .npz file
    of token ids in such windows, or ``examples``, an .npz file.

    ``held_fraction`` of it is held out: of a text or tokens the end, of examples the same mix of labels.
    ``mask_token``: the id that hides a token from an encoder or a masked model; by default the one after the data's
    last.
    """

    text: str = ""
    tokens: Path | None = None
    length: int = 64
    examples: Path | None = None
    held_fraction: float = 0.1
    mask_token: int | None = None

    def __post_init__(self) -> None:
        kinds = ("text", "tokens", "examples")
        given = [kind for kind in kinds if getattr(self, kind)]
        if len(given) != 1:
            raise InvalidInput(f"data: got {' and '.join(given) or 'nothing'}, expected one of {', '.join(kinds)}")
        if self.tokens is not None and self.tokens.suffix not in TOKEN_FILES:
            raise InvalidInput(f"data: got tokens {self.tokens}, expected a file in {' or '.join(TOKEN_FILES)}")
        if self.length < 1:
            raise InvalidInput(f"data: got length {self.length}, expected at least 1")
        if not 0.0 < self.held_fraction < 1.0:
            raise InvalidInput(f"data: got held_fraction {self.held_fraction}, expected between 0 and 1")
        if self.mask_token is not None and self.mask_token < 0:
            raise InvalidInput(f"data: got mask_token {self.mask_token}, expected 0 or more")

    @property
    def windows(self) -> bool:
        """Whether it is one row of tokens, of which samples are windows."""
        return self.examples is None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSettings:
    """When training ends at the latest: after ``steps`` or ``epochs``, whichever comes first; 0 is no such limit."""

    steps: int = 0
    epochs: int = 0

    def __post_init__(self) -> None:
        if self.steps < 0 or self.epochs < 0 or not (self.steps or self.epochs):
            raise InvalidInput(f"stop: got steps {self.steps} and epochs {self.epochs}, expected at least one above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """How the held-out part is looked at: after ``every`` steps, 0 for each epoch, and at the end.

    ``batch_size`` 0: as in training, or as in one of its turns where the schedule is folded. ``num_samples`` 0: all.
    Training stops when ``patience`` evaluations brought no gain of ``min_delta`` (0: never). ``keep``: the parameters
    that it ends with, the last or the best evaluation's.
    """

    every: int = 0
    batch_size: int = 0
    num_samples: int = 0
    patience: int = 0
    min_delta: float = 0.0
    keep: Literal["last", "best"] = "last"

    def __post_init__(self) -> None:
        for name in ("every", "batch_size", "num_samples", "patience"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"evaluation: got {name} {getattr(self, name)}, expected 0 or more")
        if not 0.0 <= self.min_delta < inf:
            raise InvalidInput(f"evaluation: got min_delta {self.min_delta}, expected 0.0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Where the job's state goes ``every`` so many steps (0: at the end alone), of which the last ``keep`` stay.

    ``resume``: a folder of checkpoints with whose newest one to begin. A ``folder`` that has one already comes first,
    so the same command goes on where it was stopped. ``weights``: a ``.safetensors`` file for what the model ends with.
    """

    folder: Path | None = None
    every: int = 0
    keep: int = 3
    resume: Path | None = None
    weights: Path | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and self.weights.suffix != SAFETENSORS:
            raise InvalidInput(f"checkpoints: got weights {self.weights}, expected a name that ends in {SAFETENSORS}")
        if self.every < 0 or self.keep < 1:
            raise InvalidInput(
                f"checkpoints: got every {self.every} and keep {self.keep}, expected from 0 and from 1 on"
            )
        if self.every and self.folder is None:
            raise InvalidInput(f"checkpoints: got every {self.every} and no folder, expected a folder for them")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """What else is looked at: a ``timeline`` of each rank, ``tensorboard``, the ``traffic`` of one step by axis, and
    ``mfu`` on a CPU, whose peak has to be measured first. A job that stands still for ``hang_after_s`` is ended, and
    what hung is named.
    """

    timeline: bool = False
    tensorboard: bool = False
    traffic: bool = False
    mfu: bool = False
    hang_after_s: float = 300.0

    def __post_init__(self) -> None:
        if not 0.0 < self.hang_after_s <= MAX_HANG_S:
            raise InvalidInput(
                f"watch: got hang_after_s {self.hang_after_s}, expected a positive number of seconds, at most "
                f"{MAX_HANG_S:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A whole job. Two configs that differ in ``parallel`` alone train the same model."""

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
        if self.seed < 0:
            raise InvalidInput(f"training: got seed {self.seed}, expected 0 or more")
        if self.evaluation.keep == "best" and (self.checkpoints.folder or self.checkpoints.resume):
            raise InvalidInput(
                "evaluation: got keep 'best' beside checkpoints, expected 'last': a checkpoint has one set of values"
            )
        encoder, pretrained, weights = self.model.encoder, self.model.pretrained, self.checkpoints.weights
        if encoder is not None and self.data.windows and self.data.length > encoder.context:
            raise InvalidInput(
                f"data: got length {self.data.length}, expected at most the encoder's context {encoder.context}"
            )
        if pretrained is not None and weights is not None:
            _check_export(pretrained.folder, weights)
        check_communication(self.communication, self.parallel, (self.evaluation.every, self.checkpoints.every))
        check_traffic(self.communication, counted=self.watch.traffic)
        check_skips(self.communication, self.training.max_skips)
        check_rate(self.rate, self.training, self.parallel, plain=self.communication.plain)

    @property
    def evaluation_size(self) -> int:
        """Samples of an evaluation's batch over all ranks."""
        turns = self.training.accumulate if self.parallel.folded else 1
        return self.evaluation.batch_size or self.training.batch_size // turns


def parse_config(text: str, where: str, instead: Tables = NOTHING) -> TrainConfig:
    """The config in a TOML text; ``where`` names it in errors. ``instead``: values by table and key that take the place
    of the text's. Raises InvalidInput."""
    try:
        row = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise InvalidInput(f"{where}: not TOML ({exc})") from exc
    for table, values in instead.items():
        if isinstance(row.setdefault(table, {}), dict):
            row[table] |= values
    return record_of(TrainConfig, row, where)


def read_train_config(path: Path, instead: Tables = NOTHING) -> TrainConfig:
    """The config in a TOML file, as ``parse_config`` has it. Raises InvalidInput."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidInput(f"{path}: cannot be read ({exc})") from exc
    return parse_config(text, str(path), instead)


def check_config(config: TrainConfig, num_processes: int) -> None:
    """Raise InvalidInput, with all the numbers, unless so many processes can carry the config out.

    Raises RuntimeMissing if it asks for what is not installed.
    """
    if num_processes < 1:
        raise InvalidInput(f"datacenter job: got {num_processes} processes, expected at least 1")
    mesh, pretrained, initial = config.parallel.mesh, config.model.pretrained, config.model.initial
    if pretrained is not None and initial is not None and weights_in(pretrained.folder):
        raise InvalidInput(
            f"model: got initial {initial} and weights in {pretrained.folder}, expected one of them; leave initial "
            "out, or take a folder that has config.json alone"
        )
    if config.model.app and config.model.layout is None and mesh.pp * mesh.tp > 1:
        raise InvalidInput(
            f"mesh {mesh}: got pp {mesh.pp} and tp {mesh.tp} for the App {config.model.app}, whose module cannot be "
            "cut or split without names; take dp_replicate and dp_shard, or give [model.layout]"
        )
    check_job(config.model.parallel_layout, config.parallel, config.training, num_processes)
    if config.data.windows:
        check_sequence(config.parallel, config.data.length)
    _check_evaluation(config)
    if config.watch.tensorboard:
        check_tensorboard()


def _check_export(folder: Path, weights: Path) -> None:
    """Raise InvalidInput unless the weights of a model out of a folder make another folder such as that."""
    try:
        same = weights.parent.resolve() == folder.resolve()
    except (OSError, RuntimeError, ValueError) as exc:
        raise InvalidInput(f"checkpoints: got weights {weights}, expected the path of a file ({exc})") from exc
    if same:
        raise InvalidInput(
            f"checkpoints: got weights {weights} in the folder that the model comes from, expected another folder: "
            "a config.json is written beside them"
        )
    if weights.name != ONE_FILE:
        raise InvalidInput(
            f"checkpoints: got weights {weights} of a model of transformers, expected the name {ONE_FILE}, by which "
            "from_pretrained finds them"
        )


def fit_config(config: TrainConfig, num_processes: int) -> TrainConfig:
    """The same job on another number of processes: its mesh fitted to them, its global batch as it was.

    Raises InvalidInput if it cannot be.
    """
    mesh = config.parallel.mesh.fit(num_processes)
    try:
        fitted = replace(config, parallel=replace(config.parallel, mesh=mesh))
        check_config(fitted, num_processes)
    except InvalidInput as exc:
        if mesh == config.parallel.mesh:
            raise
        raise InvalidInput(
            f"{exc}; this is mesh {config.parallel.mesh} fitted to {num_processes} processes: take a batch that can be "
            "divided among every number of machines, or other numbers of them"
        ) from exc
    return fitted


def _check_evaluation(config: TrainConfig) -> None:
    """Raise InvalidInput unless an evaluation's batch can be divided, and is what a folded schedule is used to."""
    mesh, turns = config.parallel.mesh, config.training.accumulate
    size, pieces = config.evaluation.batch_size, mesh.num_parts * config.parallel.microbatches
    if size % pieces:
        raise InvalidInput(
            f"evaluation: got batch_size {size}, expected a multiple of {mesh.num_parts} parts x "
            f"{config.parallel.microbatches} microbatches = {pieces}"
        )
    if config.parallel.folded and config.evaluation_size * turns != config.training.batch_size:
        raise InvalidInput(
            f"evaluation: got batch_size {size} and schedule {config.parallel.schedule}, expected "
            f"{config.training.batch_size // turns} (batch {config.training.batch_size} in {turns} turns): it takes "
            "batches of one size; leave it out, or take another schedule"
        )
