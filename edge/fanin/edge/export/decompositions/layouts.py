"""Images with samples last, and the ones that are already known so: what lies between two products stays as it is.

A product over places or channels wants images as (C, places, N), and torch's own order is (N, C, places). Blocks of
rows stand beside each other there, so that a block's neighbours are a shift away::

    (N, C, num * step, width)   ->   (C, step * width, num * N)

Each operator is traced by itself, between images in torch's order, and what changes the order back and forth is most
of the time of a small one. So the values from which an image was made are kept beside it while a graph is traced:
the next operator takes those, and as nobody takes the image then, the tracer drops it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Images of ``size`` (height, width) as ``num`` blocks of ``step`` rows."""

    size: tuple[int, int]
    num: int
    step: int

    @property
    def is_exact(self) -> bool:
        """Whether there is nothing but the image; what is padded is zero, and an operator may make it another value."""
        return self.num * self.step == self.size[0]

    def values(self, images: Tensor) -> Tensor:
        """(N, C, height, width) to (C, step * width, num * N)."""
        samples, channels, height, width = images.shape
        rows = images.permute(1, 2, 3, 0)
        if not self.is_exact:
            rows = pad(rows, (0, 0, 0, 0, 0, self.num * self.step - height))
        if self.num > 1:
            rows = rows.reshape(channels, self.num, self.step * width, samples).transpose(1, 2)
        return rows.reshape(channels, self.step * width, self.num * samples)

    def images(self, values: Tensor) -> Tensor:
        """(C, step * width, num * N) to (N, C, height, width)."""
        channels, (height, width) = values.shape[0], self.size
        if self.num > 1:
            values = values.reshape(channels, self.step * width, self.num, -1).transpose(1, 2)
        rows = values.reshape(channels, self.num * self.step, width, -1)
        return (rows if self.is_exact else rows[:, :height]).permute(3, 0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    image: Tensor
    version: int
    values: Tensor
    layout: Layout


class Images:
    """The images that have been made in a trace, and the values that they were made from."""

    def __init__(self) -> None:
        # By identity, and held: when a tensor is gone, its id is another's.
        self._known: dict[int, _Known] = {}

    def layout(self, *images: Tensor) -> Layout | None:
        """The layout of the first of these that is known."""
        return next((known.layout for image in images if (known := self._find(image)) is not None), None)

    def values(self, image: Tensor, layout: Layout) -> Tensor:
        """The image's values in this layout."""
        known = self._find(image)
        return known.values if known is not None and known.layout == layout else layout.values(image)

    def image(self, values: Tensor, layout: Layout) -> Tensor:
        """An image in torch's order, whose values are known from now on."""
        return self._keep(layout.images(values), values, layout)

    def place_by_place(self, function: Callable[..., object]) -> Callable[..., object]:
        """A function of images where each place depends on that place alone, in the layout in which they are known.

        Of others it is what it was; an operator gives torch's word for: leave it as it is.
        """

        def found(*given: object, **named: object) -> object:
            tensors = [value for value in given if isinstance(value, Tensor)]
            layout = self.layout(*tensors)
            if layout is None or any(tensor.shape != tensors[0].shape for tensor in tensors):
                return NotImplemented if isinstance(function, OpOverload) else function(*given, **named)
            values = [self.values(value, layout) if isinstance(value, Tensor) else value for value in given]
            made = function(*values, **named)
            assert isinstance(made, Tensor), "so are all that are place by place"
            return self.image(made, layout)

        return found

    def detach(self, image: Tensor) -> object:
        """``aten.detach``, which autograd keeps results by."""
        known = self._find(image)
        if known is None:
            return NotImplemented
        return self._keep(torch.ops.aten.alias.default(image), known.values, known.layout)

    def _keep(self, image: Tensor, values: Tensor, layout: Layout) -> Tensor:
        if layout.is_exact:
            self._known[id(image)] = _Known(image=image, version=image._version, values=values, layout=layout)
        return image

    def _find(self, image: Tensor) -> _Known | None:
        """None also for an image that has been written to since."""
        known = self._known.get(id(image))
        return known if known is not None and image._version == known.version else None
