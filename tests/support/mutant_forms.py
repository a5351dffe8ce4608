"""Mutants of fanin's decompositions, and tiny Apps whose graphs use them.

Each result of a decomposition is mutated separately, so that the check must detect an error in a single gradient.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from fanin.edge.export import App, Loss, Recipe, Sgd, cross_entropy, next_token
from fanin.edge.export.formats.graphs import FORMATS
from fanin.edge.export.formats.int8.folding import fold_norms
from fanin.edge.export.graph.decompositions.tables import ONNX, TFLITE, Forms, Table
from fanin.edge.export.graph.forward import trace_infer
from fanin.edge.export.module.prepare import prepare
from support.mutants import FACTORS, Mutant, verify_traced

NUM_CLASSES: Final = 3
NUM_TOKENS: Final = 7


class Residual(nn.Module):
    """A depthwise convolution of narrow images, which stay in its block layout up to a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.deep = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 3, padding=1, groups=2)
        self.flat, self.head = nn.Conv2d(2, 2, 1), nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (B, 2, 4, 2)."""
        deep = torch.relu(self.deep(self.first(x)))
        logits: Tensor = self.head((deep + F.relu6(1.0 + self.flat(deep))).flatten(1))
        return logits


class Images(nn.Sequential):
    """A norm, and pools with equal windows, for images (B, 2, 4, 4)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(2, 2, 1),
            nn.GroupNorm(1, 2),
            nn.MaxPool2d(2),
            nn.Upsample(scale_factor=4),
            nn.AvgPool2d(2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8, NUM_CLASSES),
        )


class Borders(nn.Module):
    """Paddings, other upsampling, a transposed convolution, selected positions and assignments at a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.raised = nn.Conv2d(2, 3, 3), nn.ConvTranspose2d(3, 2, 2, stride=2)
        self.last, self.head = nn.Conv2d(3, 3, 1), nn.Linear(16 + 3 + 3 + 3, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (B, 2, 4, 4)."""
        x = torch.tanh(self.first(F.pad(x, (1, 1, 1, 1), mode="reflect")))
        x = torch.index_put(x, (x < -0.5,), torch.tensor(-0.75))
        x = x * 1.0
        x[x > 0.5] = 0.75
        x = F.pad(F.pad(x, (0, 1, 1, 0), mode="replicate"), (1, 0, 0, 1), mode="reflect")
        x = F.interpolate(self.last(x), size=7, mode="nearest-exact")
        # There are three slices, because the signs of two wrong gradients would cancel.
        raised = self.raised(x[:, :, 1:3, 1:3])[:, :, ::2].flatten(1)
        picked = x[:, [0, 2, 2]].mean(3).select(2, 1)
        like = torch.empty_like(x).fill_(2.0).mean((2, 3))
        logits: Tensor = self.head(torch.cat([raised, picked, x[:, :, 1, 1] * 3.0, like * x.mean((2, 3))], 1))
        return logits


class Pools(nn.Module):
    """Pools with dilation, with uneven windows and without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(2, 3, 1), nn.Linear(3 * (6 + 4 + 4 + 9 + 4), NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (B, 2, 5, 4)."""
        x = self.first(x)
        parts = [
            F.adaptive_max_pool2d(x, (3, 2)),
            F.adaptive_max_pool2d(x[:, :, :4], 2),
            F.adaptive_avg_pool2d(x, (2, 2)),
            F.avg_pool2d(x, 2, padding=1, count_include_pad=False),
            F.max_pool2d(x[:, :, :4], 2, stride=1, dilation=2),
        ]
        logits: Tensor = self.head(torch.cat([part.flatten(1) for part in parts], 1))
        return logits


class Signals(nn.Module):
    """The same operators in one dimension, with a normalized weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.raised = weight_norm(nn.Conv1d(2, 3, 3)), nn.ConvTranspose1d(3, 3, 2)
        self.last, self.head = nn.Conv1d(3, 3, 3), nn.Linear(3 * 4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of signals (B, 2, 6)."""
        x = F.pad(F.pad(torch.tanh(self.first(x)), (1, 0), mode="replicate"), (1, 1), mode="reflect")
        x = self.last(F.interpolate(x, scale_factor=2.0))
        x = self.raised(F.interpolate(x, scale_factor=1.5, mode="nearest-exact"))
        x = F.adaptive_max_pool1d(F.avg_pool1d(x, 2), 4)
        logits: Tensor = self.head(x.logcumsumexp(2).flatten(1))
        return logits


class Words(nn.Module):
    """Attention over tokens, between two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.last = nn.Embedding(NUM_TOKENS, 6), nn.LayerNorm(6), nn.LayerNorm(6)
        self.mixed, self.head = nn.Linear(6, 18), nn.Linear(6, NUM_TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, T, tokens) of tokens (B, T)."""
        embedded = self.embed(x)
        query, key, value = self.mixed(self.norm(embedded)).chunk(3, -1)
        weights = torch.softmax(query @ key.transpose(-1, -2), -1)
        logits: Tensor = self.head(self.last(embedded + F.gelu(weights @ value)))
        return logits


class Moved(nn.Module):
    """Smooth upsampling, images of one channel, diagonals, windows, sorting and additions at an index."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(1, 1, 1), nn.Linear(264, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (B, 1, 4, 4)."""
        x = torch.tanh(self.first(x))
        rows, empty = x[:, 0], torch.zeros_like(x[:, 0])
        places = rows.detach().argsort(2)
        parts = [
            F.interpolate(x, scale_factor=1.5, mode="bilinear"),
            F.interpolate(x, size=3, mode="bicubic"),
            F.interpolate(x.flatten(2), size=7, mode="linear"),
            F.interpolate(x, scale_factor=2.0),
            F.interpolate(x, size=6, mode="nearest-exact"),
            rows.diagonal(dim1=1, dim2=2),
            rows.flatten(1).unfold(1, 4, 3),
            rows.sort(2, descending=True).values,
            rows.topk(2, 1).values,
            empty.scatter_add(2, places, rows * rows),
            empty.scatter(2, places[:, :, :3], torch.exp(rows[:, :, :3])),
            empty.index_add(1, torch.arange(4) % 3, torch.sin(rows)),
            rows.sort(dim=1, stable=True).values,
        ]
        logits: Tensor = self.head(torch.cat([part.flatten(1) for part in parts], 1))
        return logits


def sequence_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each sequence (B,), computed by torch's function."""
    return F.cross_entropy(outputs.transpose(1, 2), targets.long(), reduction="none", ignore_index=-1).mean(1)


def class_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each sample (B,), computed by torch's function."""
    return F.cross_entropy(outputs, targets.long(), reduction="none")


MODELS: Final[Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...], Loss]]] = MappingProxyType(
    {
        "residual": (Residual, (2, 4, 2), cross_entropy),
        "images": (Images, (2, 4, 4), cross_entropy),
        "borders": (Borders, (2, 4, 4), class_loss),
        "pools": (Pools, (2, 5, 4), cross_entropy),
        "signals": (Signals, (2, 6), cross_entropy),
        "moved": (Moved, (1, 4, 4), cross_entropy),
        "words": (Words, (5,), next_token),
        "sequence": (Words, (5,), sequence_loss),
    }
)
"""The module of each App, the shape of its inputs, and its loss. One-dimensional inputs are tokens."""


def app_of_model(name: str) -> App:
    """Return an App of ``MODELS``, always with the same parameters."""
    make, shape, loss = MODELS[name]
    torch.manual_seed(0)
    is_text = len(shape) == 1
    calibration = torch.randint(0, NUM_TOKENS, (8, *shape), dtype=torch.int32) if is_text else torch.randn(8, *shape)
    return App(
        name=name,
        module=make(),
        calibration=calibration,
        batch_size=4,
        num_classes=NUM_TOKENS if is_text else NUM_CLASSES,
        loss=loss,
        recipe=Recipe(optimizer=Sgd(momentum=0.0)),
    )


USERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "residual": "relu threshold_backward hardtanh hardtanh_backward add.Tensor detach convolution_backward "
        "onnx:convolution",
        "images": "native_group_norm native_group_norm_backward max_pool2d_with_indices_backward avg_pool2d_backward "
        "upsample_nearest2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward",
        "borders": "reflection_pad2d reflection_pad2d_backward replication_pad2d replication_pad2d_backward pad "
        "_upsample_nearest_exact2d_backward index_put slice_backward select_backward empty_permuted "
        "nll_loss_forward nll_loss_backward conv_transpose2d.input tflite:convolution",
        "pools": "adaptive_max_pool2d adaptive_max_pool2d_backward max_pool2d avg_pool2d max_pool2d_with_indices",
        "signals": "reflection_pad1d reflection_pad1d_backward replication_pad1d replication_pad1d_backward "
        "upsample_nearest1d_backward _upsample_nearest_exact1d_backward adaptive_max_pool1d conv_transpose1d "
        "_weight_norm_interface_backward logcumsumexp avg_pool1d",
        "moved": "upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward "
        "diagonal_backward unfold_backward sort sort.stable argsort topk scatter.src scatter_add index_add "
        "upsample_nearest2d _upsample_nearest_exact2d upsample_nearest2d.vec _upsample_nearest_exact2d.vec",
        "words": "gelu gelu_backward _softmax_backward_data native_layer_norm_backward embedding_dense_backward",
        "sequence": "nll_loss2d_forward nll_loss2d_backward",
    }
)
"""The operators whose mutants run in a model, in all formats or in one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormMutant:
    """One result of one form, times a factor.

    Attributes:
        forms: The decompositions of a graph format.
        is_infer: Whether the form is one of ``infer``.
        operator: The operator.
        index: Index of the mutated result.
        factor: The factor.
        model: A key of ``MODELS``.
    """

    forms: Forms
    is_infer: bool
    operator: OpOverload
    index: int
    factor: float
    model: str

    def verify(self) -> None:
        """Trace the model with the mutated form. Raises UnsupportedModel; AssertionError if the form is not used."""
        calls: list[bool] = []
        verify_forms(self.model, self._mutated(calls), is_infer=self.is_infer)
        assert calls, f"{self.operator}: model {self.model} does not use result {self.index}, expected one that does"

    def verify_true(self) -> None:
        """Trace the model with the true forms. Raises UnsupportedModel."""
        verify_forms(self.model, self.forms, is_infer=self.is_infer)

    def _mutated(self, calls: list[bool]) -> Forms:
        def table() -> Table:
            forms = self.forms.forward() if self.is_infer else self.forms.backward()
            true = forms[self.operator]

            def form(*args: object, **kwargs: object) -> object:
                result = true(*args, **kwargs)
                values = list(result) if isinstance(result, tuple) else [result]
                value = values[self.index] if result is not NotImplemented else None
                if not isinstance(value, Tensor) or not value.is_floating_point():
                    return result
                calls.append(True)
                values[self.index] = value * self.factor
                return tuple(values) if isinstance(result, tuple) else values[0]

            return {**forms, self.operator: form}

        return replace(self.forms, forward=table) if self.is_infer else replace(self.forms, backward=table)


def verify_forms(model: str, forms: Forms, *, is_infer: bool) -> None:
    """Compare the graphs of a model with torch: the train and evaluate graphs, or the float ``infer`` graph.

    Raises:
        UnsupportedModel: A graph differs from torch.
    """
    app = app_of_model(model)
    if not is_infer:
        verify_traced(app, app, forms)
        return
    prepared = prepare(app)
    fold_norms(trace_infer(prepared, FORMATS[forms.graph_format].num_samples), prepared, forms)


def own_forms(table: Table) -> list[OpOverload]:
    """Return the operators of a table that have a form of fanin. The others have torch's decomposition."""
    # A partial function has the module of the function that it calls.
    functions = {operator: form.func if isinstance(form, partial) else form for operator, form in table.items()}
    return [operator for operator, function in functions.items() if function.__module__.startswith("fanin.")]


def name_of(operator: OpOverload) -> str:
    """Return the name of an operator of ATen: ``relu``, ``add.Tensor``."""
    return str(operator).removeprefix("aten.").removesuffix(".default")


def form_mutants() -> Iterator[Mutant]:
    """Yield mutants of every result of every form of fanin in every graph format."""
    users = {name: model for model, names in USERS.items() for name in names.split()}
    for forms in (ONNX, TFLITE):
        for is_infer, table in ((False, forms.backward()), (True, forms.forward())):
            for operator in own_forms(table):
                name = name_of(operator)
                if name in WITHOUT_RESULT:
                    continue
                model = users.get(f"{forms.graph_format}:{name}") or users[name]
                for index in range(len(operator._schema.returns)):
                    part = f"{forms.graph_format} {'infer ' if is_infer else ''}{name}[{index}]"
                    if part.split()[-1] in NOT_FLOAT:
                        continue
                    for change, factor in FACTORS.items():
                        form = FormMutant(
                            forms=forms, is_infer=is_infer, operator=operator, index=index, factor=factor, model=model
                        )
                        yield Mutant(
                            kind="decomposition",
                            part=part,
                            change=change,
                            verify=form.verify,
                            verify_true=form.verify_true,
                        )


WITHOUT_RESULT: Final = ("index.Tensor", "index_put_", "new_empty_strided")
"""A form that only refuses some arguments, one that returns what it has written, and one that returns zeros."""
NOT_FLOAT: Final = (
    "adaptive_max_pool1d[1]",
    "adaptive_max_pool2d[1]",
    "max_pool2d_with_indices[1]",
    "sort[1]",
    "topk[1]",
    "sort.stable[1]",
    "argsort[0]",
)
"""Results that are indices."""
