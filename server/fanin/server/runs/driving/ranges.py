"""The ranges of the tensors of one device, before its Update is accepted.

A device's value is that of its base Version plus its change. A statistic of the next Version is a weighted mean of such
values (``sets``), so it is in its range if each of them is. One device can thus fail no Round of the others by a
statistic. A value out of range by at most one step is honest: that is the rounding of a codec.

A parameter with a range is checked, too, unless the Plan has stages: these change the Update after the training.
"""

import math
from collections import OrderedDict
from functools import partial
from typing import Final

import numpy as np

from fanin.edge.codecs.fixed import AnyCodec, decoded_part
from fanin.edge.codecs.vector import VectorLayout
from fanin.edge.tensors import Float32s, TensorSpec
from fanin.protos.errors import InvalidUpdate
from fanin.protos.messages import UpdateHeader, Version
from fanin.protos.roles import RoleKind, TensorRole
from fanin.server.aggregation.fold import blocks_within
from fanin.server.aggregation.folding import limited, problem_of
from fanin.server.aggregation.parameters import parameter_pieces
from fanin.server.storage.protocols.files import BlobReader, Payloads
from fanin.server.storage.records import RoundRecord

MAX_VERSIONS: Final = 4
"""Versions whose checked values are remembered: a stale Update seldom has an older one, and then it is read again."""


class DeviceRanges:
    """The check of the values of single devices, for the Updates of one Run.

    Args:
        layout: The layout of the Updates' vectors.
        codec: The codec of the Updates.
        has_stages: Whether the Plan has stages.

    Attributes:
        are_checked: Whether the check reads anything.
    """

    def __init__(self, layout: VectorLayout, codec: AnyCodec, *, has_stages: bool) -> None:
        table = layout.table
        self._codec = codec
        self._table = table
        self._num_values = layout.total_table.num_values
        self._is_checked = [_is_checked(spec.role, has_stages=has_stages) for spec in table.specs]
        self.are_checked = any(self._is_checked)
        # By digest: the values of all checked blocks, end to end.
        self._bases: OrderedDict[str, Float32s] = OrderedDict()

    def check(
        self, header: UpdateHeader, device: str, origin: tuple[RoundRecord, Version], files: tuple[Payloads, BlobReader]
    ) -> None:
        """Check the values of a device whose payload is durable.

        Args:
            header: The header of the Update.
            device: The device.
            origin: The Round of its Assignment, and the base Version of this Round.
            files: The payloads, and the blobs of the Versions.

        Raises:
            InvalidUpdate: A value is out of the range of its role by more than a step.
            NotFound: The base Version is damaged.
            Corrupted: The base Version or the payload is damaged.
        """
        (record, version), (payloads, blobs) = origin, files
        codec, base, position = self._codec, self._base(version, blobs), 0
        read = partial(payloads.read_part, header, device)
        for block, (spec, offset) in enumerate(zip(self._table.specs, self._table.offsets, strict=True)):
            if not self._is_checked[block] or not spec.num_values:
                continue
            exponent = record.grid[block] + header.shifts[block]
            part = (offset, offset + spec.num_values)
            change = np.ldexp(decoded_part(codec, read, part, self._num_values).astype(np.float64), exponent)
            _check_block(spec, base[position : position + spec.num_values] + change, math.ldexp(1.0, exponent))
            position += spec.num_values

    def _base(self, version: Version, blobs: BlobReader) -> Float32s:
        """Return the values of all checked blocks of a Version, end to end."""
        if version.sha256 not in self._bases:
            parts: list[Float32s] = []
            first = 0
            for piece in parameter_pieces(blobs, version, self._table):
                last = first + piece.size
                parts += [
                    piece[start - first : stop - first].copy()
                    for start, stop, is_checked in blocks_within(self._table, self._is_checked, first, last)
                    if is_checked
                ]
                first = last
            self._bases[version.sha256] = np.concatenate([np.empty(0, np.float32), *parts])
        self._bases.move_to_end(version.sha256)
        if len(self._bases) > MAX_VERSIONS:
            self._bases.popitem(last=False)
        return self._bases[version.sha256]


def _is_checked(role: TensorRole, *, has_stages: bool) -> bool:
    return role.role is not RoleKind.PARAMETER or (role.is_bounded and not has_stages)


def _check_block(spec: TensorSpec, values: np.ndarray, step: float) -> None:
    # A value beyond float32 becomes infinite here, and is refused with those out of their range.
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    if limited(rounded, spec.role, step) is None:
        raise InvalidUpdate(
            f"update: tensor {spec.name!r}: after the training it has {problem_of(rounded, spec.role)}; correct the "
            "training, or the role or range that the run declares for the tensor",
            code="FN-0643",
        )
