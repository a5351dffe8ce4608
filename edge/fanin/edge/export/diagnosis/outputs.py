"""The remedy for an output of a module, or for a loss, of a wrong form."""

from collections.abc import Callable, Sequence
from typing import Final

from torch import Tensor

from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.protos.texts import counted

NUM_TRACED: Final = 2
"""Samples of the batch whose output has a wrong form."""
UNLABELED: Final = (
    f"a position without a label, such as that of padding, has the label {NO_TOKEN}: write ignore_index={NO_TOKEN} in "
    "F.cross_entropy, or exclude such positions by (y >= 0) from a loss of y.clamp(min=0)"
)
OF_PAIRS: Final = (
    "compares the samples of a batch with each other: a function of (output, y, mask), with the mask of the real "
    "samples (docs/howto/batch-losses.md)"
)
OF_POSITIONS: Final = (
    "cross_entropy and next_token need the classes in the last axis; write loss= as the mean over the positions of "
    f"each sample of F.cross_entropy(output, y, ignore_index={NO_TOKEN}, reduction='none')"
)


def advice_on_output(output: object, paths: Sequence[str], num_classes: int, class_axis: int) -> str:
    """Return the remedy for an output of a wrong form.

    Args:
        output: The output.
        paths: The paths of its tensors; none for a tensor.
        num_classes: Of the App.
        class_axis: Of the App.
    """
    if paths:
        return f"set output= in the App to the path of that tensor, one of {[*paths]}"
    if not isinstance(output, Tensor):
        return "return that tensor alone in forward, not inside a tuple, list or other object"
    if not num_classes:
        return "return output.unsqueeze(-1) in forward"
    if num_classes in output.shape[1:]:
        axis = list(output.shape).index(num_classes, 1)
        return f"the classes are in axis {axis}: set class_axis={axis} in the App"
    if output.dim() < 2:
        return "return one row of logits for each sample"
    if not -output.dim() < class_axis < output.dim():
        return f"set class_axis in the App to the axis of the classes, from 1 to {output.dim() - 1}"
    advice = (
        f"set num_classes={output.shape[class_axis]} in the App, or give the last layer "
        f"{counted(num_classes, 'output')}"
    )
    if output.dim() == 2 and output.shape[0] == output.shape[1] == NUM_TRACED:
        # Two samples with two outputs, or a score for each pair of them.
        return (
            f"{advice}; if these are scores of pairs of samples, return an embedding of each sample by itself and "
            "compare them in a BatchLoss"
        )
    return advice


def advice_on_loss(
    y: Tensor, output: object, accepts: Callable[[Tensor], bool], has_positions: bool, is_declared: bool
) -> str:
    """Return the remedy for a loss that fails; "" if its own error is the best one.

    Args:
        y: The targets (B, ...).
        output: The output that the loss receives.
        accepts: Returns whether the loss accepts other targets of this shape.
        has_positions: Whether the loss needs the classes in the last axis, and the App has another ``class_axis``.
        is_declared: Whether the App has classes, or declares its targets.
    """
    excluded = y.clamp(min=0)
    if bool((y != excluded).any()) and not y.is_floating_point() and accepts(excluded):
        return UNLABELED
    if not isinstance(output, Tensor):
        paths = [*output] if isinstance(output, dict) else []
        return f"the loss receives a dict of the tensors at {paths}: write loss= as a function of it and y"
    if has_positions:
        return OF_POSITIONS
    if is_declared:
        return ""
    return (
        f"y has the shape {tuple(y.shape)} of the output; if the output has the logits of classes, set "
        f"num_classes={y.shape[-1]} in the App; else declare targets of another shape by targets="
    )


def advice_on_losses(losses: object, y: Tensor, num_classes: int, *, is_of_batch: bool) -> str:
    """Return the remedy for losses of another shape than (B,), or than () for the loss of a batch."""
    if is_of_batch:
        return "write (mask * losses).sum() / mask.sum() for losses (batch,)"
    advice = "use reduction='none'"
    if isinstance(losses, Tensor) and losses.dim() > 1 and losses.shape[0] == len(y):
        advice = "take the mean over the other dimensions: losses.flatten(1).mean(1)"
    elif isinstance(losses, Tensor) and not losses.dim():
        advice = f"{advice} and leave the mean out, or write loss=BatchLoss(function) if it {OF_PAIRS}"
    if not num_classes:
        advice = f"y has the shape {tuple(y.shape)}: {advice}, or declare another shape by targets= in the App"
    return advice
