"""Settings of a job: one frozen record for each table of its config.

Each record validates the values that it can judge alone. ``config`` combines the records, and checks them together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Final, Literal, get_args

from fanin.datacenter.config.records import NAMED
from fanin.datacenter.families.family import FamilyModel
from fanin.datacenter.families.known import family_model, family_named, family_names, is_family
from fanin.datacenter.parallel.layout import Layout, ModelSizes, Style
from fanin.protos.errors import InvalidInput

SAFETENSORS: Final = ".safetensors"
FLAT: Final = ".npy"
"""Suffix of a file with one flat array of all parameters in the order of names."""
TOKEN_FILES: Final = (".npy", ".npz")
SHAKESPEARE: Final = "tinyshakespeare"
"""The one text that is located by name (FANIN_DATA, a cache, its mirror). Any other value is a path."""
MAX_HANG_S: Final = 1e6
"""Eleven days. A longer timeout is no protection, and torch's C++ timeouts do not support much larger numbers."""
UNKNOWN_LAYOUT: Final = Layout(
    sizes=ModelSizes(num_layers=1, num_heads=0, num_kv_heads=0, feed_forward=0),
    inputs=(),
    layers="",
    outputs=(),
    plan={},
)
"""The layout of a module of unknown structure: it can be replicated and sharded, but not split by pp or tp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSettings:
    """The structure of an App's module, the table ``[model.layout]``. Only pp and tp need it.

    The module's forward must be a chain that passes one tensor along: ``inputs``, each layer, ``outputs``. Sizes must
    be multiples of tp; 0 is a size that the module does not have.

    Attributes:
        layers: Name of the list of layers.
        num_layers: Length of that list.
        inputs: Names of the modules before the layers.
        outputs: Names of the modules after the layers.
        plan: Pattern over module names to a style of parallel/layout.py.
        num_heads: Attention heads.
        num_kv_heads: Key and value heads.
        feed_forward: Width of the feed-forward layers.
        tied: Names of a parameter that has two: the copy, after the layers, and the original, before them.
        sequence: Where sequence parallelism may split the positions of activations (B, T, width), as in
            parallel/layout.py: ``model``, ``layers``, or nowhere.
    """

    layers: str
    num_layers: int
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    plan: Mapping[str, str] = field(default_factory=dict)
    num_heads: int = 0
    num_kv_heads: int = 0
    feed_forward: int = 0
    tied: tuple[str, ...] = ()
    sequence: Literal["", "layers", "model"] = ""

    def __post_init__(self) -> None:
        if len(self.tied) not in (0, 2):
            raise InvalidInput(
                f"layout: got tied {list(self.tied)}, expected two names of one parameter: the copy and the original",
                code="FN-1285",
            )
        if not self.layers or self.num_layers < 1:
            raise InvalidInput(
                f"layout: got layers {self.layers!r} and num_layers {self.num_layers}, expected the name of a list of "
                "modules and how many it has",
                code="FN-1287",
            )
        for pattern, style in self.plan.items():
            if style not in get_args(Style):
                raise InvalidInput(
                    f"layout: got {pattern} = {style!r}, expected one of {', '.join(get_args(Style))}", code="FN-1286"
                )

    @property
    def layout(self) -> Layout:
        """The same structure as a Layout, as the parallel room uses it."""
        styles: dict[str, Style] = {
            name: style for style in get_args(Style) for name in self.plan if self.plan[name] == style
        }
        sizes = ModelSizes(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            feed_forward=self.feed_forward,
        )
        return Layout(
            sizes=sizes,
            inputs=self.inputs,
            layers=self.layers,
            outputs=self.outputs,
            plan={name: styles[name] for name in self.plan},
            tied=(self.tied[0], self.tied[1]) if self.tied else None,
            sequence=self.sequence,
        )


class FamilyTables:
    """Reads the table ``[model.NAME]`` of a family."""

    def names(self) -> tuple[str, ...]:
        """Return the names of all families."""
        return family_names()

    def kind(self, name: str) -> type | None:
        """Return the config of a family, or None if no family has this name. Raises InvalidInput."""
        return family_named(name).config if is_family(name) else None

    def value(self, name: str, record: object) -> FamilyModel:
        """Return the model of a family. Raises InvalidInput."""
        return family_model(name, record)

    def named(self, value: object) -> tuple[str, object]:
        """Return the name of a model's family, and the model's config."""
        assert isinstance(value, FamilyModel)
        return value.name, value.config


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The model to train, the table ``[model]``. Set exactly one of the first two attributes.

    Attributes:
        app: An App, as ``package.module:name`` or ``path/to/file.py:name``.
        family: A model of a family, the table ``[model.NAME]``.
        layout: Structure of an App's module.
        mean_over: Unit of the mean loss; an App's loss is always a mean over samples.
        initial: A file with initial values: canonical parameters of a Version, all weights as ``.safetensors``, or one
            flat array as ``.npy``.
    """

    app: str = ""
    family: FamilyModel | None = field(default=None, metadata={NAMED: FamilyTables()})
    layout: LayoutSettings | None = None
    mean_over: Literal["", "tokens", "samples"] = ""
    initial: Path | None = None

    def __post_init__(self) -> None:
        if bool(self.app) == (self.family is not None):
            chosen = "nothing" if self.family is None else f"app and {self.family.name}"
            raise InvalidInput(f"model: got {chosen}, expected one of app, {', '.join(family_names())}", code="FN-1207")
        if self.family is not None and self.layout is not None:
            raise InvalidInput(
                f"model: got a layout and [model.{self.family.name}], expected a layout only for an App; remove it",
                code="FN-1210",
            )
        if self.app and self.mean_over == "tokens":
            raise InvalidInput(
                "model: got mean_over 'tokens' for an App, expected 'samples', over which an App's loss is; remove it",
                code="FN-1210",
            )

    @property
    def parallel_layout(self) -> Layout:
        """The model's structure, as the parallel room uses it.

        For a pretrained model this reads its folder. It raises InvalidInput if that fails, and RuntimeMissing if
        ``transformers`` is not installed.
        """
        if self.family is not None:
            return self.family.layout
        return UNKNOWN_LAYOUT if self.layout is None else self.layout.layout


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """The data to train on, the table ``[data]``. Set exactly one of ``text``, ``tokens`` and ``examples``.

    Attributes:
        text: A text file, or ``tinyshakespeare``; each character is a token.
        tokens: An .npy or .npz file of token ids.
        length: Tokens in a window of a text or of tokens.
        examples: An .npz file of examples.
        held_fraction: Share of the data to hold out: the end of a text or of tokens; of examples the same mix of
            labels.
        mask_token: Id of the mask for an encoder or a masked model; by default the id after the data's last one.
    """

    text: str = ""
    tokens: Path | None = None
    length: int = 64
    examples: Path | None = None
    held_fraction: float = 0.1
    mask_token: int | None = None

    def __post_init__(self) -> None:
        kinds = ("text", "tokens", "examples")
        chosen = [kind for kind in kinds if getattr(self, kind)]
        if len(chosen) != 1:
            raise InvalidInput(
                f"data: got {' and '.join(chosen) or 'nothing'}, expected one of {', '.join(kinds)}", code="FN-1207"
            )
        if self.tokens is not None and self.tokens.suffix not in TOKEN_FILES:
            raise InvalidInput(
                f"data: got tokens {self.tokens}, expected a file in {' or '.join(TOKEN_FILES)}", code="FN-1231"
            )
        if self.length < 1:
            raise InvalidInput(f"data: got length {self.length}, expected at least 1", code="FN-1241")
        if not 0.0 < self.held_fraction < 1.0:
            raise InvalidInput(
                f"data: got held_fraction {self.held_fraction}, expected between 0 and 1", code="FN-1241"
            )
        if self.mask_token is not None and self.mask_token < 0:
            raise InvalidInput(f"data: got mask_token {self.mask_token}, expected 0 or more", code="FN-1237")

    @property
    def windows(self) -> bool:
        """Whether the data is one sequence of tokens, cut into windows."""
        return self.examples is None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSettings:
    """The limits of the training, the table ``[stop]``. The first limit ends it; 0 is no limit."""

    steps: int = 0
    epochs: int = 0

    def __post_init__(self) -> None:
        if self.steps < 0 or self.epochs < 0 or not (self.steps or self.epochs):
            raise InvalidInput(
                f"stop: got steps {self.steps} and epochs {self.epochs}, expected at least one above 0", code="FN-1244"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """The evaluation on held-out samples, the table ``[evaluation]``. The last evaluation is at the end of training.

    Attributes:
        every: Steps between evaluations; 0 for one per epoch.
        batch_size: Samples in a batch; 0 for the training batch, or one of its accumulation steps if the pipeline
            schedule is folded.
        num_samples: Samples to evaluate; 0 for all.
        patience: Evaluations without improvement after which training stops; 0 for never.
        min_delta: Smallest decrease of the loss that counts as an improvement.
        keep: Final parameters: those of the last step, or those of the best evaluation.
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
                raise InvalidInput(f"evaluation: got {name} {getattr(self, name)}, expected 0 or more", code="FN-1241")
        if not 0.0 <= self.min_delta < inf:
            raise InvalidInput(f"evaluation: got min_delta {self.min_delta}, expected 0.0 or more", code="FN-1241")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """The checkpoints of a job, the table ``[checkpoints]``.

    Attributes:
        folder: Folder of the checkpoints. A job resumes from the newest one in it, so the same command continues a
            stopped job.
        every: Steps between checkpoints; 0 for one at the end.
        keep: Checkpoints to keep.
        resume: Another folder, whose newest checkpoint a job starts from if ``folder`` has none.
        weights: A ``.safetensors`` file for the final weights.
    """

    folder: Path | None = None
    every: int = 0
    keep: int = 3
    resume: Path | None = None
    weights: Path | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and self.weights.suffix != SAFETENSORS:
            raise InvalidInput(
                f"checkpoints: got weights {self.weights}, expected a name that ends in {SAFETENSORS}", code="FN-1223"
            )
        if self.every < 0 or self.keep < 1:
            raise InvalidInput(
                f"checkpoints: got every {self.every} and keep {self.keep}, expected at least 0 and at least 1",
                code="FN-1241",
            )
        if self.every and self.folder is None:
            raise InvalidInput(
                f"checkpoints: got every {self.every} and no folder, expected a folder for them", code="FN-1354"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """The monitoring of a job, the table ``[watch]``.

    Attributes:
        timeline: Whether each rank writes a timeline.
        tensorboard: Whether to write TensorBoard event files.
        traffic: Whether to count the bytes that one step sends, by mesh axis.
        mfu: Whether to report MFU on a CPU, whose peak is measured first.
        hang_after_s: Seconds without progress after which the job ends with a diagnosis of the hang.
        observers: Observers of the training on each rank, as ``package.module:factory`` or ``path/to/file.py:factory``.
    """

    timeline: bool = False
    tensorboard: bool = False
    traffic: bool = False
    mfu: bool = False
    hang_after_s: float = 300.0
    observers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.observers:
            module, _, factory = name.rpartition(":")
            if not module or not factory:
                raise InvalidInput(
                    f"watch: got observer {name!r}, expected package.module:factory or path/to/file.py:factory",
                    code="FN-1360",
                )
        if not 0.0 < self.hang_after_s <= MAX_HANG_S:
            raise InvalidInput(
                f"watch: got hang_after_s {self.hang_after_s}, expected a positive number of seconds, at most "
                f"{MAX_HANG_S:g}",
                code="FN-1241",
            )
