"""Images in the order (C, positions, N), kept in that order between two matrix products.

A product over positions or channels needs samples last. torch stores images as (N, C, height, width). The layout puts
blocks of ``step`` rows side by side, so the neighbour of a block is one shift away::

    (N, C, num * step, width)   ->   (C, step * width, num * N)

The tracer decomposes each operator separately, with images in torch's order before and after it. For small images the
conversions take most of the time. ``Images`` therefore remembers, for each image that a form returns, the values from
which it was built. The next form starts from those values. Nothing uses the converted image then, so the tracer drops
it, and both conversions with it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The storage of images of ``size`` (height, width) as ``num`` blocks of ``step`` rows each."""

    size: tuple[int, int]
    num: int
    step: int

    @property
    def is_exact(self) -> bool:
        """Whether the blocks hold no padding rows. Padding is zero, and an operator could change it."""
        return self.num * self.step == self.size[0]

    def values(self, images: Tensor) -> Tensor:
        """Convert images (N, C, height, width) to values (C, step * width, num * N)."""
        samples, channels, height, width = images.shape
        rows = images.permute(1, 2, 3, 0)
        if not self.is_exact:
            rows = pad(rows, (0, 0, 0, 0, 0, self.num * self.step - height))
        if self.num > 1:
            rows = rows.reshape(channels, self.num, self.step * width, samples).transpose(1, 2)
        return rows.reshape(channels, self.step * width, self.num * samples)

    def images(self, values: Tensor) -> Tensor:
        """Convert values (C, step * width, num * N) to images (N, C, height, width).

        The images are contiguous, like torch's: a view in the App or in an operator depends on it.
        """
        channels, (height, width) = values.shape[0], self.size
        if self.num > 1:
            values = values.reshape(channels, self.step * width, self.num, -1).transpose(1, 2)
        rows = values.reshape(channels, self.num * self.step, width, -1)
        return (rows if self.is_exact else rows[:, :height]).permute(3, 0, 1, 2).contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownImage:
    """An image, the values from which it was built, and its version counter at that time."""

    image: Tensor
    version: int
    values: Tensor
    layout: BlockLayout


class Images:
    """The images of one trace whose values in a block layout are known."""

    def __init__(self) -> None:
        # By identity. The record keeps the tensor alive, so its id cannot be reused.
        self._known: dict[int, _KnownImage] = {}

    def layout(self, *images: Tensor) -> BlockLayout | None:
        """Return the layout of the first of these images that is known; None if none is."""
        return next((known.layout for image in images if (known := self._find(image)) is not None), None)

    def values(self, image: Tensor, layout: BlockLayout) -> Tensor:
        """Return the values of an image in a layout, converted only if they are not known in that layout."""
        known = self._find(image)
        return known.values if known is not None and known.layout == layout else layout.values(image)

    def image(self, values: Tensor, layout: BlockLayout) -> Tensor:
        """Build the image (N, C, height, width) of these values and remember them."""
        return self._keep(layout.images(values), values, layout)

    def positionwise(self, function: Callable[..., object]) -> Callable[..., object]:
        """Wrap a positionwise function so that it computes in the layout of its known images.

        In a positionwise function (ReLU, addition) each position of the result depends on the same position of the
        arguments.

        Args:
            function: An operator, or a decomposition of one.

        Returns:
            A form of the operator, with the arguments of ``function``. If no argument is a known image, or if shapes
            differ, a decomposition is called unchanged and an operator is kept (``NotImplemented``).
        """

        def form(*args: object, **kwargs: object) -> object:
            tensors = [value for value in args if isinstance(value, Tensor)]
            layout = self.layout(*tensors)
            if layout is None or any(tensor.shape != tensors[0].shape for tensor in tensors):
                return NotImplemented if isinstance(function, OpOverload) else function(*args, **kwargs)
            values = [self.values(value, layout) if isinstance(value, Tensor) else value for value in args]
            result = function(*values, **kwargs)
            assert isinstance(result, Tensor), "a positionwise function returns one tensor"
            return self.image(result, layout)

        form.__signature__ = _signature(function)  # type: ignore[attr-defined]  # read by inspect.signature
        return form

    def detach(self, x: Tensor) -> object:
        """Compute ``aten.detach``, with which autograd saves results, as an alias that stays known."""
        known = self._find(x)
        if known is None:
            return NotImplemented
        return self._keep(torch.ops.aten.alias.default(x), known.values, known.layout)

    def _keep(self, image: Tensor, values: Tensor, layout: BlockLayout) -> Tensor:
        if layout.is_exact:
            self._known[id(image)] = _KnownImage(image=image, version=image._version, values=values, layout=layout)
        return image

    def _find(self, image: Tensor) -> _KnownImage | None:
        """Return the record of an image; None if it is not known or was written to since."""
        known = self._known.get(id(image))
        return known if known is not None and image._version == known.version else None


def _signature(function: Callable[..., object]) -> inspect.Signature:
    """Return the arguments of a function, or those of an operator's schema by name."""
    if not isinstance(function, OpOverload):
        return inspect.signature(function)
    plain, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    arguments = function._schema.arguments
    return inspect.Signature([inspect.Parameter(each.name, named if each.kwarg_only else plain) for each in arguments])
