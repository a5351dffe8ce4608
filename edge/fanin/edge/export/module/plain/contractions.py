"""``einsum`` of three and more tensors.

torch asks a library for the best order of the products. It computes the order from the sizes, and so fixes the number
of samples. torch's own order, from left to right, adds a dimension of 1 for each label to every tensor. The converter
of TFLite confuses these dimensions.
"""

from collections.abc import Sequence
from string import ascii_letters
from typing import Final

import torch
from torch import Tensor

REST: Final = "..."


def contraction(*operands: object) -> object:
    """Compute ``torch.einsum`` of three and more tensors from left to right, two at a time."""
    equation, tensors = _parts(operands)
    terms, arrow, output = equation.replace(" ", "").partition("->")
    labels = terms.split(",")
    if len(tensors) < 3 or len(labels) != len(tensors):
        return NotImplemented
    unused = "".join(letter for letter in ascii_letters if letter not in equation)
    widths = [tensor.dim() - len(label.replace(REST, "")) for label, tensor in zip(labels, tensors, strict=True)]
    num = max((width for width, label in zip(widths, labels, strict=True) if REST in label), default=0)
    labels = [label.replace(REST, unused[num - width : num]) for width, label in zip(widths, labels, strict=True)]
    every = "".join(labels)
    if not arrow:
        output = REST + "".join(sorted(letter for letter in every if every.count(letter) == 1 and letter not in unused))
    output = output.replace(REST, unused[:num])
    label, result = labels[0], tensors[0]
    for index in range(1, len(tensors)):
        later = "".join(labels[index + 1 :]) + output
        kept = "".join(letter for letter in dict.fromkeys(label + labels[index]) if letter in later)
        kept = output if index == len(tensors) - 1 else kept
        result = torch.einsum(f"{label},{labels[index]}->{kept}", result, tensors[index])
        label = kept
    return result


def _parts(operands: Sequence[object]) -> tuple[str, list[Tensor]]:
    """Return the equation and the tensors of a call, also if it has a list of labels after each tensor."""
    equation, *rest = operands
    if isinstance(equation, str):
        tensors = rest[0] if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
        return equation, [each for each in tensors if isinstance(each, Tensor)]
    labels = [_letters(each) for each in operands[1::2]]
    output = f"->{_letters(operands[-1])}" if len(operands) % 2 else ""
    return ",".join(labels) + output, [each for each in operands[: 2 * len(labels) : 2] if isinstance(each, Tensor)]


def _letters(labels: object) -> str:
    assert isinstance(labels, list | tuple), "torch checks the types"
    return "".join(REST if label is Ellipsis else ascii_letters[label] for label in labels)
