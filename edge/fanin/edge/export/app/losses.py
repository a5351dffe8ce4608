"""Losses: of each sample, in operators that every runtime has, and of a batch.

A loss returns one number for each sample (B,), so that a mask can exclude the padding of a last short batch. A loss
that compares the samples of a batch receives the mask itself (``BatchLoss``). Both are a sum over the real samples and
their number, which is the form of everything that reads a loss (``loss_sum``).

The right class is selected by a comparison. ``one_hot`` and ``gather`` would read the labels while they are traced, or
need a scatter in the backward pass, which not every runtime has.

The comparison becomes a product with 1 and 0. A selection is slower: where the loss dominates, it costs 6 % of a step
in onnxruntime and 9 % in LiteRT. A product of 0 and infinity is NaN, so a module must hide a class by a large negative
number and not by minus infinity.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fanin.protos.errors import UnsupportedModel

Loss = Callable[..., Tensor]
"""(output of the module (B, ...), y (B, ...)) -> loss of each sample (B,). The output is a dict of tensors by path for
an App with several paths in ``output``. A ``BatchLoss`` accepts a mask, too, and returns one number."""


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """A loss of a whole batch, for losses that compare its samples with each other: ``App(loss=BatchLoss(function))``.

    Its value is the mean over the real samples, and its gradient is that of plain torch on the real samples alone. An
    export checks that the content of the others changes neither.

    Args:
        function: (output of the module (B, ...), y (B, ...), mask (B,)) -> a number. The mask is 1.0 for a real sample
            and 0.0 for the padding of a last short batch. A batch has at least one real sample.

    Raises:
        UnsupportedModel: ``function`` is no function of three arguments.

    Example:
        ``BatchLoss(lambda output, y, mask: (mask * (output - y).square().mean(1)).sum() / mask.sum())``
    """

    function: Callable[..., Tensor]

    def __post_init__(self) -> None:
        function: object = self.function
        call = function.forward if isinstance(function, torch.nn.Module) else function
        if not callable(call) or isinstance(call, type) or not _accepts_three(call):
            raise UnsupportedModel(
                f"BatchLoss: got {function!r}, expected a function of (output, y, mask) that returns the mean loss "
                "over the samples with mask 1; write def loss(output, y, mask)",
                code="FN-0718",
            )

    def __call__(self, output: object, y: Tensor, mask: Tensor) -> Tensor:
        """Return the mean loss over the samples with mask 1, a scalar."""
        return self.function(output, y, mask)


def function_of(loss: Loss) -> Loss:
    """Return the user's own code of a loss."""
    return loss.function if isinstance(loss, BatchLoss) else loss


def check_loss(what: str, loss: object) -> None:
    """Raise UnsupportedModel unless this is a function without parameters that learn.

    Args:
        what: Prefix of error messages.
        loss: The value of the App's argument ``loss``.
    """
    if not callable(loss) or isinstance(loss, type):
        raise UnsupportedModel(
            f"{what}: got {loss!r}, expected a function of (output, y) that returns one loss for each "
            "sample, such as fanin.edge.export.cross_entropy or torch.nn.CrossEntropyLoss(reduction='none')",
            code="FN-0718",
        )
    function: object = function_of(loss)
    named = list(function.named_parameters()) if isinstance(function, torch.nn.Module) else []
    own = [name for name, value in named if value.requires_grad]
    if own:
        raise UnsupportedModel(
            f"{what}: {type(function).__name__} has parameters of its own, {own}, which no device "
            "would train; move them into the module and return what the loss needs as a further output, or call "
            "requires_grad_(False) on the loss",
            code="FN-0719",
        )


def loss_sum(loss: Loss, output: object, y: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of a loss over the real samples, a scalar: of a batch's loss, its value times their number.

    Args:
        loss: The loss.
        output: The output of the module, or several.
        y: Targets as the loss receives them.
        mask: 1.0 for a real sample (B,). Without any, the sum is 0.0.
    """
    return sum_of(loss, mask, values_of(loss, output, y, mask))


def values_of(loss: Loss, output: object, y: Tensor, mask: Tensor) -> Tensor:
    """Return the result of a loss: a number for each sample (B,), or one for the batch."""
    if not isinstance(loss, BatchLoss):
        return loss(output, y)
    # The division by the number of samples would be one by 0, and its gradient would not be finite.
    return loss(output, y, torch.maximum(mask, 1.0 - mask.sum().clamp(max=1.0)))


def sum_of(loss: Loss, mask: Tensor, values: Tensor) -> Tensor:
    """Return the sum over the real samples from the result of a loss."""
    return values * mask.sum() if isinstance(loss, BatchLoss) else (mask * values).sum()


def _accepts_three(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError:
        return False
    except ValueError:
        return True  # a built-in function without a signature
    return True


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each sample in nats.

    Args:
        logits: (B, num_classes).
        labels: (B,) integer classes.

    Returns:
        Losses (B,).
    """
    return -(_right(logits, labels) * torch.log_softmax(logits, dim=-1)).sum(dim=-1)


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy over the positions of each sample, in nats.

    Args:
        logits: (B, T, V).
        tokens: (B, T) next tokens. A position with the token -1 is excluded.

    Returns:
        Losses (B,).
    """
    counted = (tokens >= 0).to(logits.dtype)
    losses = -(_right(logits, tokens) * torch.log_softmax(logits, dim=-1)).sum(dim=-1)
    return (counted * losses).sum(dim=1) / counted.sum(dim=1).clamp(min=1.0)


def squared_error(values: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error over the values of each sample.

    Args:
        values: Output of the module (B, ...).
        target: Targets of the same shape.

    Returns:
        Losses (B,).

    Raises:
        ValueError: The shapes differ. Broadcasting them would return a meaningless number.
    """
    if values.shape != target.shape:
        raise ValueError(
            f"squared error: got values {tuple(values.shape)} and y {tuple(target.shape)}, expected the same"
        )
    return (values - target).square().flatten(start_dim=1).mean(dim=1)


def _right(logits: Tensor, labels: Tensor) -> Tensor:
    """Return 1 at the right class and 0 elsewhere, in the shape of the logits."""
    classes = torch.arange(logits.shape[-1], device=logits.device, dtype=labels.dtype)
    return (labels.unsqueeze(-1) == classes).to(logits.dtype)
