"""Planning from options that a person writes: a model's name, a number of ranks, a device, links.

``plan`` is the public function behind ``fanin plan`` and ``fanin.datacenter.plan``. It resolves the options to numbers
and runs the search. Nothing is started.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

from fanin.datacenter.network.links import Topology, link_of
from fanin.datacenter.parallel.settings import Precision
from fanin.datacenter.planner.choices import GIGABYTE, LayoutChoice, LayoutRequest, describe
from fanin.datacenter.planner.facts import planned_facts
from fanin.datacenter.planner.presets import model_named
from fanin.datacenter.planner.search import plan as search
from fanin.datacenter.planner.search import price
from fanin.datacenter.planner.timing import Machine
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.datacenter.watch.flops import HARDWARE, Hardware, cpu_hardware
from fanin.protos.errors import InvalidInput
from fanin.protos.texts import counted

PRECISIONS: Final[dict[str, Precision]] = {"bf16": "bf16", "full": "full", "double": "double"}
"""Precisions that the planner supports."""
USABLE_MEMORY: Final = 0.9
"""Share of a device's memory that tensors can use. CUDA, NCCL and fragmentation use the remaining share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """A model and the machines to train it on.

    Attributes:
        model: Name of a preset, or path of a .toml file with a family's table, such as ``[model.decoder]``.
        world: Number of ranks; by default that of ``mesh``.
        mesh: The only mesh to evaluate, such as ``pp=2,dp_shard=4``, whether it fits or not; "" for all meshes.
        memory_gb: Memory of each rank in gigabytes (10^9 bytes); by default 90 % of the device's.
        link: Link within a node: gigabytes a second, or a name such as ``nvlink4``.
        between: Link between nodes; by default the same as ``link``.
        ranks_per_node: Ranks in a node.
        device: Name of an accelerator, or ``cpu`` to measure this machine.
        batch_size: Samples in a step over all ranks.
        sequence: Tokens in a sample.
        precision: ``bf16``, ``full`` for float32, or ``double`` for float64.
        efficiency: Share of the peak that matrix products reach; by default the device's.
    """

    model: str
    world: int | None = None
    mesh: str = ""
    memory_gb: float | None = None
    link: str = "nvlink4"
    between: str = ""
    ranks_per_node: int = 8
    device: str = "h100"
    batch_size: int = 256
    sequence: int = 2048
    precision: str = "bf16"
    efficiency: float | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise InvalidInput(
                f"--precision: got {self.precision!r}, expected one of {', '.join(PRECISIONS)}", code="FN-1377"
            )
        if self.memory_gb is not None and not 0.0 < self.memory_gb * GIGABYTE < inf:
            raise InvalidInput(
                f"--memory: got {self.memory_gb}, expected a positive number of gigabytes", code="FN-1375"
            )
        if self.world is None and not self.mesh:
            raise InvalidInput(
                "ranks: got neither --world nor --mesh, expected the number of ranks, or a mesh to price",
                code="FN-1375",
            )
        if self.world is not None and self.world < 1:
            raise InvalidInput(f"--world: got {self.world}, expected at least 1 rank", code="FN-1375")
        if self.efficiency is not None and not 0.0 < self.efficiency <= 1.0:
            raise InvalidInput(
                f"--efficiency: got {self.efficiency}, expected a share above 0.0 and up to 1.0", code="FN-1375"
            )
        if self.mesh:
            MeshShape.parse(self.mesh)
        link_of(self.link)
        link_of(self.between or self.link)
        if self.device not in HARDWARE:
            if self.device != "cpu":
                raise InvalidInput(
                    f"--device: got {self.device!r}, expected cpu or one of {', '.join(HARDWARE)}", code="FN-1377"
                )
            if self.memory_gb is None:
                raise InvalidInput(
                    "--memory: missing, expected gigabytes for each rank; --device cpu needs it, because ranks share "
                    "the machine's memory",
                    code="FN-1375",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """The layouts of a model, the fastest that fits first, and the request that they answer."""

    request: LayoutRequest
    choices: tuple[LayoutChoice, ...]

    def __repr__(self) -> str:
        best = self.choices[0]
        layout, time_s = describe(best.job.parallel), best.timing.seconds
        return (
            f"PlanResult({counted(len(self.choices), 'layout')}, best: {layout}, {time_s:.3g} s a step; see .choices)"
        )


def plan(options: PlanOptions, progress: Callable[[float, int], None] = lambda share, num_layouts: None) -> PlanResult:
    """Rank every way to spread a model over ranks by predicted step time, without those that do not fit.

    Args:
        options: The model and the machines.
        progress: Called during the search with the share of the meshes done, and the number of layouts so far.

    Raises:
        InvalidInput: The model is unknown, an option does not fit it, or no layout fits.
    """
    hardware, shape = _hardware(options), MeshShape.parse(options.mesh) if options.mesh else None
    memory = USABLE_MEMORY * hardware.memory_bytes if options.memory_gb is None else options.memory_gb * GIGABYTE
    topology = Topology(
        inside=link_of(options.link),
        between=link_of(options.between or options.link),
        ranks_per_node=options.ranks_per_node,
    )
    request = LayoutRequest(
        facts=planned_facts(options.model, model_named(options.model)),
        machine=Machine(hardware=hardware, topology=topology, efficiency=options.efficiency or hardware.efficiency),
        world=options.world or (1 if shape is None else shape.num_ranks),
        memory_bytes=round(memory),
        batch_size=options.batch_size,
        sequence=options.sequence,
        precision=PRECISIONS[options.precision],
    )
    choices = search(request, progress) if shape is None else price(request, shape)
    return PlanResult(request=request, choices=tuple(choices))


def _hardware(options: PlanOptions) -> Hardware:
    if options.device in HARDWARE:
        return HARDWARE[options.device]
    assert options.memory_gb is not None, "the options are checked"
    return cpu_hardware(round(options.memory_gb * GIGABYTE))
