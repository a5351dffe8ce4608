"""The record of a model family, and a model of a family.

A ``Family`` holds functions of a config, which is a frozen dataclass that validates itself. A ``FamilyModel`` is a
family with one config: the table ``[model.NAME]`` of a job. All its methods may be called before a process starts. They
raise InvalidInput for any error of the family's functions: these may be another package's.
"""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn

from fanin.datacenter.parallel.layout import Layout
from fanin.datacenter.watch.flops import Work
from fanin.protos.errors import FaninError, InvalidInput
from fanin.protos.records import are_all, check_part

C = TypeVar("C")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenModel:
    """The tokens of a model and the kind of its predictions.

    Attributes:
        vocabulary: number of token ids.
        positions: the longest sequence; None for any length.
        masked: whether the model predicts masked tokens. Otherwise it predicts the next token.
        own_mask: whether the model already has a mask token, so the job must name it (``data.mask_token``).
    """

    vocabulary: int
    positions: int | None = None
    masked: bool = False
    own_mask: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The source files of a model, and the files that its final weights need.

    Attributes:
        weights: a ``.safetensors`` file, or the index of several, with weights that are not yet in the module.
        aside: patterns for the names of further tensors in ``weights``, which are ignored.
        exported: contents of the config.json to write next to the final weights.
    """

    weights: Path | None = None
    aside: tuple[str, ...] = ()
    exported: bytes | None = None


def no_files(config: object, module: nn.Module) -> ModelFiles:
    """Return the files of a model without source files."""
    return ModelFiles()


def no_work(config: object) -> Work | None:
    """Return the FLOPs of a family that does not report them."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Generic[C]):
    """One kind of model: the functions of its config.

    A module maps tokens (B, T) to logits (B, T, vocabulary).

    Attributes:
        config: a frozen dataclass of the sizes. Its fields are the keys of the table ``[model.NAME]``.
        build: (config, seed) -> the module. Its parameters are a function of both alone.
        layout: (config) -> the names of its modules, and their distribution over ranks.
        tokens: (config) -> its tokens.
        work: (config) -> the FLOPs of a token, for the MFU; None if they are unknown.
        presets: configs by name, for ``fanin plan``.
        files: (config, module) -> the files of the model, called after ``build``.
        planned: whether the planner's formulas describe the layers: pre-norm attention and SwiGLU, as in ``decoder``.

    Raises:
        InvalidInput: a part is missing or has another type.
    """

    config: type[C]
    build: Callable[[C, int], nn.Module]
    layout: Callable[[C], Layout]
    tokens: Callable[[C], TokenModel]
    work: Callable[[C], Work | None] = no_work
    presets: Mapping[str, C] = field(default_factory=dict)
    files: Callable[[C, nn.Module], ModelFiles] = no_files
    planned: bool = False

    def __post_init__(self) -> None:
        """Check the parts: they may be another package's."""
        config, presets = cast(object, self.config), cast(object, self.presets)
        is_config = isinstance(config, type) and is_dataclass(config)
        what = f"Family of {self.config.__name__ if is_config else 'an unknown config'}"
        settings = getattr(config, "__dataclass_params__", None)
        is_frozen = is_config and settings is not None and settings.frozen
        check_part(what, "config", self.config, is_frozen, "a frozen dataclass of sizes")
        for part in ("build", "layout", "tokens", "work", "files"):
            function = getattr(self, part)
            check_part(what, part, function, callable(function), "a function of the config; see docs/howto/families.md")
        are_configs = isinstance(presets, Mapping) and are_all([*presets.values()], list, self.config)
        check_part(what, "presets", self.presets, are_configs, f"a dict of {self.config.__name__} by name")
        check_part(what, "planned", self.planned, isinstance(self.planned, bool), "true or false")


# The config's type differs between the families of one table, which Python's types cannot express.
AnyFamily = Family[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyModel:
    """A model of a family: the table ``[model.NAME]``. Create it with ``known.family_model``.

    Attributes:
        name: name of the family.
        family: the family.
        config: an instance of ``family.config``.
    """

    name: str
    family: AnyFamily
    config: object

    def build(self, seed: int) -> nn.Module:
        """Return the module, with parameters from ``seed``."""
        return self._result("build", nn.Module, lambda: self.family.build(self.config, seed))

    def skeleton(self) -> nn.Module:
        """Return the module on torch's meta device, which uses no memory."""
        with torch.device("meta"):
            return self.build(0)

    @property
    def layout(self) -> Layout:
        """The names of its modules, and their distribution over ranks."""
        return self._result("layout", Layout, lambda: self.family.layout(self.config))

    @property
    def tokens(self) -> TokenModel:
        """The tokens that it reads."""
        return self._result("tokens", TokenModel, lambda: self.family.tokens(self.config))

    @property
    def work(self) -> Work | None:
        """The FLOPs of a token, or None if they are unknown."""
        work = self._call("work", lambda: self.family.work(self.config))
        return None if work is None else self._result("work", Work, lambda: work)

    def files(self, module: nn.Module) -> ModelFiles:
        """Return the files of the model, after ``build`` returned ``module``."""
        return self._result("files", ModelFiles, lambda: self.family.files(self.config, module))

    def _result(self, part: str, kind: type[T], call: Callable[[], object]) -> T:
        """Return the result of a function of the family. Raises InvalidInput for another type, or if it raises."""
        value = self._call(part, call)
        check_part(f"Family {self.name!r}", f"result of {part}", value, isinstance(value, kind), f"a {kind.__name__}")
        return cast("T", value)

    def _call(self, part: str, call: Callable[[], T]) -> T:
        """Return the result of ``call``, which calls a function of the family. Raises InvalidInput if it raises."""
        try:
            return call()
        except FaninError:
            raise
        except (Exception, SystemExit) as exc:  # Any error: the code is not fanin's. It may even call sys.exit.
            text = " ".join(f"{type(exc).__name__}: {exc}".split()).removesuffix(":")
            raise InvalidInput(
                f"family {self.name!r}: {part} raised {text}{_line_of(exc)}; correct it", code="FN-1212"
            ) from exc


def _line_of(exc: BaseException) -> str:
    """Return " (file:line)", the innermost line in the file of the family's function; "" if it has none."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(exc.__traceback__)]
    outside = [(file, line) for file, line in places if file != __file__]
    lines = [line for file, line in outside if file == outside[0][0]]
    return f" ({Path(outside[0][0]).name}:{lines[-1]})" if lines else ""


def matmul_values(module: nn.Module) -> int:
    """Return the number of values that each token is multiplied with: all matrices outside of embedding tables."""
    matrices = {
        id(value): value.numel()
        for each in module.modules()
        if not isinstance(each, nn.Embedding)
        for value in each.parameters(recurse=False)
        if value.ndim > 1
    }
    return sum(matrices.values())
