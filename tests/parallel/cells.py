"""The cells of the parity matrix: the model and the ranks of each. Needs no torch.

A cell is compared with one process that trains the same job. The settings of that process (``Cell.reference``) have few
variants. The settings of the mesh have as many variants as exist. Some cells contain a deliberate error, which the
parity check must detect.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from fanin.datacenter.parallel.pipelines.schedules import SCHEDULES
from fanin.datacenter.ranks.mesh import AXES, MeshShape

# A wrong gradient shows in the first step, and a wrong moment of AdamW in the second. Growing rounding errors and long
# accumulations show in the nightly steps. A step of eight ranks takes half a second on a few cores. So only the
# schedules, on two and four ranks, and one mesh of three axes train for long.
NUM_STEPS: Final = 3
NUM_NIGHTLY_STEPS: Final = 4
NUM_LONG_STEPS: Final = 20
WORLD: Final = 8
BATCH, LENGTH, VOCABULARY = 16, 8, 97


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training job. ``fault`` names a deliberate error."""

    mesh: str
    schedule: str = "GPipe"
    microbatches: int = 1
    accumulate: int = 1
    recompute: str = "none"
    layer_times: tuple[float, ...] = ()
    reshard: bool | None = None
    replicate: str = "ddp"
    offload: bool = False
    precision: str = "full"
    compile: bool = False
    sequence: bool = False
    fault: str = ""
    nightly: bool = False
    # The one process has these settings as well.
    layers: int = 2
    tied: bool = False
    dtype: str = "float64"
    clip: float | None = 0.5
    freeze: tuple[str, ...] = ()
    family: str = "decoder"
    long: bool = False

    @property
    def shape(self) -> MeshShape:
        """The mesh."""
        return MeshShape.parse(self.mesh)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the training."""
        return NUM_LONG_STEPS if self.long else NUM_NIGHTLY_STEPS if self.nightly else NUM_STEPS

    @property
    def reference(self) -> str:
        """Name of the results of one process that trains the same job."""
        parts = [self.family, self.dtype, f"layers{self.layers}", "tied" if self.tied else "untied"]
        parts += ["nightly"] * self.nightly + ["long"] * self.long
        return "-".join([*parts, "unclipped" if self.clip is None else f"clip{self.clip}", *self.freeze]).replace(
            "*", ""
        )

    @property
    def name(self) -> str:
        """Name of the test and of its file."""
        parts = [self.mesh, *([self.schedule] if self.shape.pp > 1 else [])]
        parts += [f"{self.accumulate}x{self.microbatches}", self.recompute * (self.recompute != "none")]
        parts += ["" if self.reshard is None else f"reshard{self.reshard}", "times" * bool(self.layer_times)]
        parts += [self.precision * (self.precision != "full")]
        parts += [
            "compiled" * self.compile,
            "sequence" * self.sequence,
            "offload" * self.offload,
            self.replicate * (self.replicate != "ddp"),
            self.reference,
            self.fault,
        ]
        return "_".join(part for part in parts if part)


def factorisations(num_ranks: int = WORLD) -> Iterator[MeshShape]:
    """Yield every mesh of ``num_ranks`` ranks."""
    for sizes in product((1, 2, 4, 8), repeat=len(AXES)):
        shape = MeshShape(**dict(zip(AXES, sizes, strict=True)))
        if shape.num_ranks == num_ranks:
            yield shape


def num_axes(shape: MeshShape) -> int:
    """Return the number of axes of a mesh that have more than one rank."""
    return sum(size > 1 for size in shape.sizes.values())


# In CI each pair of axes meets on four ranks, where groups and gradients could be mixed up. Three axes meet in
# test_char_decoder. The nightly suite has every mesh of four and of eight ranks. Some meshes recompute activations, and
# some accumulate gradients. So each of pp, dp_replicate, dp_shard and tp meets both, with tied embeddings and without.
# Copies send nothing before the last piece, so accumulation costs them little.
RECOMPUTATIONS: Final[Mapping[str, str]] = {
    "dp_shard=2,tp=4": "full",
    "dp_shard=8": "full",
    "dp_replicate=4,dp_shard=2": "selective",
    "pp=2,dp_shard=2,tp=2": "selective",
    "pp=2,dp_shard=4": "full",
    "pp=2,dp_replicate=2,dp_shard=2": "selective",
    "dp_shard=2,tp=2": "full",
    "dp_shard=4": "full",
    "dp_replicate=2,dp_shard=2": "selective",
    "pp=2,dp_shard=2": "full",
}
IN_CI: Final = frozenset(str(shape) for shape in factorisations(4) if num_axes(shape) == 2)
"""Meshes whose parity CI checks in float64."""
ACCUMULATING_MESHES: Final = (
    "dp_replicate=8",
    "dp_replicate=4,dp_shard=2",
    "dp_replicate=4",
    "dp_replicate=2,dp_shard=2",
)


def _matrix(num_ranks: int = WORLD) -> Iterator[Cell]:
    """Yield all meshes of ``num_ranks`` ranks in float64; every other one has tied embeddings.

    GPipe processes the microbatches of a pipeline in two gradient accumulation steps. On two ranks each step has one
    microbatch: as many pieces at no more cost. A cell of 1F1B needs a microbatch for each stage. Its cells with
    accumulation are in ``_schedules``.
    """
    for index, shape in enumerate(factorisations(num_ranks)):
        mesh, accumulate = str(shape), 2 if shape.pp > 1 and index % 2 == 0 else 1
        yield Cell(
            mesh=mesh,
            schedule="1F1B" if index % 2 else "GPipe",
            microbatches=shape.pp // accumulate,
            accumulate=2 if mesh in ACCUMULATING_MESHES else accumulate,
            recompute=RECOMPUTATIONS.get(mesh, "none"),
            # A collective takes milliseconds on two cores, whatever its size. So the model has as few layers as show an
            # error.
            layers=2 if mesh == "dp_shard=8" else shape.pp,
            tied=index % 2 == 0,
            clip=None if shape.tp == 4 else 0.5,
            nightly=mesh not in IN_CI,
        )


def _schedules() -> Iterator[Cell]:
    """Yield all schedules: on two ranks with accumulation and full recomputation, on four with tied embeddings.

    Schedules that split the backward pass recompute activations for each weight. Two microbatches in each accumulation
    step are enough for them.
    """
    for (name, schedule), num_ranks in product(SCHEDULES.items(), (2, 4)):
        yield Cell(
            mesh=f"pp={num_ranks}",
            schedule=name,
            microbatches=2 if num_ranks == 2 and schedule.splits_backward else 4,
            accumulate=2 if num_ranks == 2 else 1,
            layers=num_ranks * schedule.default_stages,
            tied=num_ranks == 4 or schedule.folded,
            recompute="full" if num_ranks == 2 else "none",
            # In CI the matrix has pipelines of four stages, with GPipe and 1F1B.
            nightly=num_ranks == 4,
        )


def _nightly_variants() -> Iterator[Cell]:
    """Yield variants of the matrix and the schedules for the nightly suite.

    They are the same cells in float32, and the combinations that CI leaves out. In these, each mesh has both
    accumulation and recomputation, and the other tie setting.
    """
    for cell in (*_matrix(), *_schedules()):
        yield replace(cell, dtype="float32", nightly=True, long=cell.shape.num_ranks < WORLD)
    for cell in _matrix():
        yield replace(
            cell,
            microbatches=cell.shape.pp,
            accumulate=2,
            recompute="full" if cell.recompute != "full" else "selective",
            tied=not cell.tied,
            clip=0.5,
            nightly=True,
        )


SINGLES: Final = (
    *(
        Cell(mesh=mesh, dtype="float32", clip=None, nightly=mesh != "dp_shard=4")
        for mesh in ("dp_replicate=8", "dp_shard=4", "dp_replicate=2,dp_shard=2")
    ),
    Cell(mesh="pp=2", dtype="float32", schedule="1F1B", microbatches=2, clip=None, nightly=True),
    Cell(mesh="pp=2,dp_shard=2,tp=2", schedule="1F1B", microbatches=2, tied=True, nightly=True, long=True),
    # A pipeline may have one microbatch.
    Cell(mesh="pp=2,dp_shard=2,tp=2", dtype="float32", schedule="GPipe", clip=None, nightly=True),
    Cell(mesh="dp_shard=2", microbatches=2, accumulate=2, recompute="full", tied=True),
    # In CI this mesh also splits the activations between the matrices (SEQUENCES), so no coverage is lost.
    Cell(mesh="dp_shard=2,tp=2", accumulate=2, recompute="full", layers=1, tied=True, nightly=True),
    Cell(mesh="dp_shard=2,tp=2", accumulate=2, recompute="selective", tied=True, nightly=True),
    Cell(mesh="dp_replicate=2", accumulate=2, tied=True),
    Cell(mesh="dp_replicate=2", replicate="hsdp", microbatches=2),
    Cell(mesh="dp_shard=2", offload=True),
    Cell(mesh="none", offload=True, accumulate=2, recompute="selective", tied=True),
    Cell(mesh="dp_shard=2", reshard=False, freeze=("embed.*", "layers.0.*")),
    Cell(mesh="tp=2", freeze=("layers.*.attention.*",)),
    Cell(mesh="pp=2", schedule="1F1B", microbatches=4, layers=4, layer_times=(3.0, 1.0, 1.0, 1.0, 1.0, 0.0)),
    Cell(mesh="pp=2,dp_shard=2", schedule="1F1B", microbatches=2, reshard=True, recompute="selective"),
    Cell(mesh="pp=2", schedule="GPipe", microbatches=2, freeze=("embed.*", "layers.0.*")),
)
MODELS: Final = (
    Cell(mesh="pp=2,tp=2", family="encoder", schedule="1F1B", microbatches=2, tied=True),
    Cell(mesh="dp_shard=2", family="encoder", recompute="selective", tied=True),
    Cell(mesh="pp=2,dp_shard=2,tp=2", family="llama", schedule="1F1B", microbatches=2, tied=True, nightly=True),
    Cell(mesh="pp=4,tp=2", family="llama", microbatches=4, layers=4, nightly=True),
    Cell(mesh="dp_replicate=2,dp_shard=2,tp=2", family="llama", tied=True, nightly=True),
    Cell(mesh="pp=2", family="llama", schedule="ZBV", microbatches=4, layers=4, recompute="full", nightly=True),
    Cell(mesh="pp=2,dp_shard=2,tp=2", schedule="ZBV", microbatches=4, layers=4, tied=True, nightly=True),
    Cell(mesh="pp=2,dp_shard=2,tp=2", schedule="Interleaved1F1B", microbatches=4, layers=4, tied=True, nightly=True),
)
# Convolutions, perceptrons and models of another library, on each axis and on three at once. All but a few run in the
# nightly suite.
FAMILIES: Final = (
    Cell(mesh="pp=2,tp=2", family="mlp", microbatches=2),
    # A batch norm that receives a whole batch at once computes as in one process.
    Cell(mesh="pp=2", family="resnet8-batch"),
    Cell(mesh="dp_shard=2", family="ds_cnn", accumulate=2),
    Cell(mesh="dp_shard=2,tp=2", family="llama", tied=True),
    *(
        Cell(mesh=mesh, family=family, schedule="1F1B", microbatches=2, nightly=True)
        for family, mesh in product(
            ("mlp", "cnn", "resnet8", "ds_cnn"), ("pp=2,dp_shard=2,tp=2", "dp_shard=2,tp=2", "dp_replicate=2,tp=2")
        )
    ),
    Cell(mesh="pp=2,dp_shard=2", family="resnet8", nightly=True),
    Cell(mesh="pp=4,tp=2", family="ds_cnn", microbatches=4, recompute="full", nightly=True),
    Cell(mesh="pp=2", family="ds_cnn", schedule="ZBV", microbatches=4, nightly=True),
    Cell(mesh="pp=4", family="ds_cnn-batch", nightly=True),
    Cell(mesh="pp=2,dp_shard=2,tp=2", family="encoder", schedule="1F1B", microbatches=2, nightly=True),
    Cell(mesh="dp_replicate=2,dp_shard=2,tp=2", family="encoder", recompute="full", tied=True, nightly=True),
    Cell(mesh="pp=2,tp=2", family="gemma", schedule="1F1B", microbatches=2, tied=True, nightly=True),
    *(
        Cell(mesh=mesh, family=family, schedule="1F1B", microbatches=2, tied=tied, nightly=True)
        for family, mesh, tied in product(
            ("mistral", "qwen2"), ("pp=2,dp_shard=2,tp=2", "dp_shard=2,tp=4"), (True, False)
        )
    ),
)
# Models that only data parallelism can distribute. One runs in CI. Models with expert layers and all others run in the
# nightly suite.
UNPLANNED: Final = (
    Cell(mesh="dp_shard=2", family="gpt2", tied=True),
    *(
        Cell(mesh="dp_shard=4", family=family, recompute="full", nightly=True)
        for family in ("qwen3", "phi3", "mixtral", "gpt_neox", "opt", "bert")
    ),
    Cell(mesh="dp_replicate=2,dp_shard=2", family="mixtral", nightly=True),
    Cell(mesh="dp_replicate=2", family="bert", nightly=True),
)
# If a batch is split into pieces, the batch norm's statistics are those of one piece.
STATISTICS: Final = (
    Cell(mesh="dp_shard=2", family="resnet8-batch", nightly=True),
    Cell(mesh="pp=2", family="ds_cnn-batch", microbatches=2, nightly=True),
)
# The activations between split matrices are split as well, along the sequence. The matrix has the same meshes without
# this.
SEQUENCES: Final = (
    Cell(mesh="dp_shard=2,tp=2", accumulate=2, recompute="full", layers=1, tied=True, sequence=True),
    *(
        Cell(mesh=mesh, sequence=True, recompute=recompute, nightly=True)
        for mesh, recompute in (
            ("tp=2", "selective"),
            ("tp=4", "none"),
            ("tp=8", "full"),
            ("dp_replicate=2,tp=4", "none"),
        )
    ),
    *(
        replace(cell, sequence=True, nightly=True)
        for cell in (
            Cell(mesh="pp=2,dp_shard=2,tp=2", schedule="1F1B", microbatches=2, accumulate=2, tied=True),
            Cell(mesh="pp=2,tp=4", schedule="GPipe", microbatches=2, recompute="full"),
            Cell(mesh="pp=2,tp=2", schedule="ZBV", microbatches=4, layers=4, tied=True),
            Cell(mesh="pp=2,tp=2", schedule="InterleavedZeroBubble", microbatches=2, layers=4),
            Cell(mesh="dp_shard=2,tp=2", dtype="float32", microbatches=2, clip=None),
            Cell(mesh="tp=2", freeze=("layers.*.attention.*",)),
            Cell(mesh="tp=2", freeze=("embed.*", "layers.0.*")),
            Cell(mesh="tp=4", family="encoder", tied=True),
            Cell(mesh="pp=2,dp_shard=2,tp=2", family="encoder", schedule="1F1B", microbatches=2, recompute="selective"),
            Cell(mesh="dp_shard=2,tp=4", family="llama", recompute="full"),
            Cell(mesh="pp=2,dp_shard=2,tp=2", family="llama", schedule="1F1B", microbatches=2, tied=True),
            Cell(mesh="pp=2,tp=2", family="qwen2", schedule="ZBV", microbatches=4, layers=4, tied=True),
        )
    ),
)
HALF_PRECISION: Final = tuple(
    Cell(mesh=mesh, microbatches=2, dtype="float32", clip=0.5, precision=precision)
    for mesh, precision in (("dp_shard=2", "bf16"), ("pp=2", "bf16"), ("dp_shard=2", "fp16"), ("tp=2", "fp16"))
)
# In CI only the first cell runs, because a compilation takes seconds. Combinations that fanin refuses are not here:
# schedules that split their backward pass, and full recomputation of layers that are split over tp.
_COMPILED: Final = (
    *(
        Cell(
            mesh=mesh,
            microbatches=2 if "pp" in mesh else 1,
            schedule="1F1B",
            recompute=recompute,
            compile=True,
            tied=True,
        )
        for mesh, recompute in product(("dp_shard=2", "dp_replicate=2", "pp=2"), ("none", "full", "selective"))
    ),
    Cell(mesh="tp=2", compile=True, tied=True),
    Cell(mesh="tp=2", compile=True, recompute="selective", tied=True),
    Cell(mesh="dp_shard=2,tp=2", compile=True, tied=True),
    Cell(mesh="tp=2", compile=True, sequence=True, tied=True),
    Cell(mesh="tp=2", compile=True, sequence=True, recompute="selective"),
    Cell(mesh="pp=2,dp_shard=2,tp=2", schedule="1F1B", microbatches=2, compile=True, sequence=True),
    Cell(
        mesh="pp=2,dp_shard=2,tp=2",
        schedule="1F1B",
        microbatches=2,
        accumulate=2,
        recompute="selective",
        compile=True,
        tied=True,
    ),
    Cell(mesh="pp=2", schedule="LoopedBFS", microbatches=2, layers=4, compile=True, tied=True),
)
COMPILED: Final = tuple(replace(cell, nightly=True) for cell in _COMPILED)
FAULTS: Final = (
    Cell(mesh="dp_shard=2", fault="mean-of-means"),
    Cell(mesh="pp=2", microbatches=2, tied=True, fault="untied"),
    Cell(mesh="tp=2", tied=True, fault="untied"),
)
CELLS: Final = (
    *_matrix(4),
    *_matrix(),
    *_schedules(),
    *SINGLES,
    *MODELS,
    *FAMILIES,
    *UNPLANNED,
    *SEQUENCES,
    *_nightly_variants(),
)
