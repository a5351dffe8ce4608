"""What a config says of an App's module, whose names nobody else knows: where it may be cut and how it is split."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, get_args

from fanin.datacenter.parallel.layout import Layout, ModelSizes, Style
from fanin.protos.errors import InvalidInput

WHOLE: Final = Layout(
    sizes=ModelSizes(num_layers=1, num_heads=0, num_kv_heads=0, feed_forward=0),
    inputs=(),
    layers="",
    outputs=(),
    plan={},
)
"""The layout of a module that nothing is known of: it can be copied and sharded, not cut or split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSettings:
    """The names of an App's modules, where it is to be cut by pp or split by tp.

    Its forward must be a chain: ``inputs``, then each of the ``num_layers`` of the list ``layers``, then ``outputs``,
    one tensor handed on. ``plan``: pattern over module names to a style of parallel/layout.py. The numbers, 0 where
    there are none, must be multiples of tp.
    """

    layers: str
    num_layers: int
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    plan: Mapping[str, str] = field(default_factory=dict)
    num_heads: int = 0
    num_kv_heads: int = 0
    feed_forward: int = 0

    def __post_init__(self) -> None:
        if not self.layers or self.num_layers < 1:
            raise InvalidInput(
                f"layout: got layers {self.layers!r} and num_layers {self.num_layers}, expected the name of a list of "
                "modules and how many it has"
            )
        for pattern, style in self.plan.items():
            if style not in get_args(Style):
                raise InvalidInput(f"layout: got {pattern} = {style!r}, expected one of {', '.join(get_args(Style))}")

    @property
    def layout(self) -> Layout:
        """The same for the parallel rooms."""
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
        )
