"""The step on one process: the reference for every mesh, and the behavior that needs no other rank."""

import dataclasses
import gc
import multiprocessing
import weakref
from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._ops import OpOverload
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fanin.datacenter.families.decoders import decoder_layout
from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import TrainableModel, divided_loss, layers_of
from fanin.datacenter.parallel.engine import Engine, build_engine
from fanin.datacenter.parallel.objective import TOKENS, ScoredObjective, sample_objective
from fanin.datacenter.parallel.pipelines.stages import Skip
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.parallel.steps.scaling import LossScale
from fanin.datacenter.parallel.transformers_layout import pretrained_model
from fanin.datacenter.ranks.devices import build_mesh
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.edge.export.app.app import cross_entropy
from fanin.edge.runtimes.graphs import NO_TOKEN
from fanin.protos.errors import InvalidInput, UnsupportedModel

CONFIG = DecoderConfig(vocabulary=13, width=16, num_layers=2, num_heads=4, num_kv_heads=2, feed_forward=8)
TRAINING = TrainingSettings(batch_size=8, learning_rate=0.01)


def engine_of(training: TrainingSettings = TRAINING, **parallel: object) -> Engine:
    model = TrainableModel(module=Decoder(CONFIG, seed=1).double(), layout=decoder_layout(CONFIG))
    return build_engine(model, ParallelSettings(**parallel), training, None)


def batch() -> Batch:
    tokens = torch.arange(8 * 6).reshape(8, 6) ** 2 % 13
    targets = tokens[:, 1:].clone()
    targets[::2, 2:] = NO_TOKEN
    return Batch(inputs=tokens[:, :-1], targets=targets)


@pytest.mark.parametrize("limit", [0.2, 100.0])
def test_a_step_is_torchs_own_on_the_mean_over_tokens(limit: float) -> None:
    engine = engine_of(dataclasses.replace(TRAINING, weight_decay=0.1, clip_norm=limit))
    module, examples = Decoder(CONFIG, seed=1).double(), batch()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        logits = module(examples.inputs).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, examples.targets.flatten(), ignore_index=NO_TOKEN)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
        optimizer.step()
        result = engine.step(examples)
        assert [float(result.loss), float(result.norm)] == pytest.approx([loss.item(), norm.item()], abs=1e-12)
        assert result.count == 4 * 5 + 4 * 2
    parameters, expected = engine.full_parameters(), dict(module.named_parameters())
    assert list(parameters) == list(expected)
    assert all(torch.allclose(parameters[name], expected[name], rtol=0, atol=1e-12) for name in expected)


@pytest.mark.parametrize(("accumulate", "microbatches"), [(2, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_accumulation_microbatches_and_recomputation_change_nothing(
    accumulate: int, microbatches: int, recompute: str
) -> None:
    reference = engine_of()
    engine = engine_of(
        dataclasses.replace(TRAINING, accumulate=accumulate), microbatches=microbatches, recompute=recompute
    )
    for _ in range(3):
        assert float(engine.step(batch()).loss) == pytest.approx(float(reference.step(batch()).loss), abs=1e-12)
    parameters, expected = engine.full_parameters(), reference.full_parameters()
    assert all(torch.allclose(parameters[name], expected[name], rtol=0, atol=1e-12) for name in expected)


def test_evaluation_trains_nothing_and_is_the_loss_of_the_next_step() -> None:
    engine = engine_of()
    engine.step(batch())
    before = engine.full_parameters()
    loss, count = engine.evaluate(batch())
    assert all(torch.equal(before[name], value) for name, value in engine.full_parameters().items())
    assert float(engine.step(batch()).loss) == pytest.approx(loss / count, abs=1e-12)


def test_frozen_parameters_keep_their_bits_and_others_do_not() -> None:
    engine = engine_of(dataclasses.replace(TRAINING, freeze=("embed.*", "layers.0.*"), weight_decay=0.1))
    before = engine.full_parameters()
    engine.step(batch())
    unchanged_names = {name for name, value in engine.full_parameters().items() if torch.equal(value, before[name])}
    assert unchanged_names == {name for name in before if name.startswith(("embed.", "layers.0."))}


def test_a_pattern_without_a_match_is_refused() -> None:
    with pytest.raises(InvalidInput, match="FN-1242"):
        engine_of(dataclasses.replace(TRAINING, freeze=("layer.*",)))


def test_patterns_that_leave_nothing_to_train_are_refused() -> None:
    with pytest.raises(InvalidInput, match="FN-1243"):
        engine_of(dataclasses.replace(TRAINING, freeze=("*.*",)))


def test_layers_are_collected_from_plain_containers() -> None:
    first, second, third = (nn.Linear(2, 2) for _ in range(3))
    row = nn.Sequential(nn.Linear(2, 2))
    module = nn.Module()
    module.many = nn.ModuleList([first, nn.ModuleDict({"more": second}), Skip()])
    module.row, module.free = row, nn.ParameterList([nn.Parameter(torch.ones(2))])
    module.last = third
    assert list(layers_of(module)) == [first, second, row, third]


@given(evaluating=st.booleans(), seed=st.integers(0, 9))
def test_the_last_stage_scores_evaluations_though_it_has_a_backward_pass(*, evaluating: bool, seed: int) -> None:
    scored, generator = ScoredObjective(TOKENS), torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, 5, generator=generator, requires_grad=True)
    targets = logits.argmax(dim=-1)
    targets[0, 0], targets[1, 1] = NO_TOKEN, (targets[1, 1] + 1) % 5
    scores: list[torch.Tensor] = []
    loss = divided_loss(scored.objective)(logits, targets, 2.0, scores if evaluating else None)
    loss.backward()
    assert logits.grad is not None
    assert [each.tolist() for each in scores] == ([[4.0, 5.0]] if evaluating else [])
    assert scored.take().tolist() == [0.0, 0.0]


def test_only_evaluations_are_scored() -> None:
    scored = ScoredObjective(TOKENS)
    model = TrainableModel(module=Decoder(CONFIG, seed=1), layout=decoder_layout(CONFIG), objective=scored.objective)
    engine = build_engine(model, ParallelSettings(microbatches=2), TRAINING, None)
    engine.step(batch())
    assert scored.take().tolist() == [0.0, 0.0]
    engine.evaluate(batch())
    assert scored.take()[1] == int((batch().targets != NO_TOKEN).sum())
    assert scored.take().tolist() == [0.0, 0.0]


def test_the_rate_is_that_of_the_following_steps() -> None:
    engine = engine_of(dataclasses.replace(TRAINING, optimizer="sgd", momentum=0.0))
    before = engine.full_parameters()
    engine.set_learning_rate(1e-9)
    engine.step(batch())
    change = max(float((value - before[name]).abs().max()) for name, value in engine.full_parameters().items())
    assert 0 < change < 1e-8


def test_another_models_parameters_are_refused_and_change_nothing() -> None:
    engine = engine_of()
    before = engine.full_parameters()
    other = before | {"head.weight": torch.zeros(2, 2)}
    partial = {name: value for name, value in before.items() if name != "norm.weight"}
    for values, expected in ((other, "parameters: 1 of another shape, such"), (partial, "parameters: 1 missing, such")):
        with pytest.raises(ValueError, match=expected):
            engine.load_parameters({name: value + 1 for name, value in values.items()})
    assert all(torch.equal(before[name], value) for name, value in engine.full_parameters().items())


def test_a_part_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="got a part of 8 samples for 3 chunks"):
        list(batch().chunks(3))


def test_an_overflow_skips_a_step_and_lowers_the_scale() -> None:
    module = Decoder(CONFIG, seed=1)
    objective = dataclasses.replace(TOKENS, loss_sum=lambda outputs, targets: TOKENS.loss_sum(outputs, targets) * 1e35)
    model = TrainableModel(module=module, layout=decoder_layout(CONFIG), objective=objective)
    engine = build_engine(model, ParallelSettings(precision="fp16"), TRAINING, None)
    before = engine.full_parameters()
    result = engine.step(batch())
    assert result.skipped
    assert all(torch.equal(before[name], value) for name, value in engine.full_parameters().items())


@given(finite=st.lists(st.booleans(), max_size=60), growth_interval=st.integers(1, 5))
def test_the_scale_halves_at_each_overflow_and_doubles_after_the_growth_interval(
    finite: list[bool], growth_interval: int
) -> None:
    scale, num_calm, expected = LossScale(factor=8.0, growth_interval=growth_interval), 0, 8.0
    for each in finite:
        if each:
            scale.succeeded()
        else:
            assert scale.overflowed() == (expected > 1.0)
        num_calm = num_calm + 1 if each else 0
        if not each:
            expected = max(1.0, expected / 2)
        elif num_calm == growth_interval:
            expected, num_calm = expected * 2, 0
        assert scale.factor == expected
    other = LossScale(growth_interval=growth_interval)
    other.load(scale.state)
    for _ in range(growth_interval):
        other.succeeded()
        scale.succeeded()
        assert other.state == scale.state


def test_an_engine_resumes_with_the_scale_of_another() -> None:
    engines = [engine_of(precision="fp16") for _ in range(2)]
    engines[0].load_scale_state({"loss_scale": 8.0, "loss_scale_calm": 3.0, "looks": 1.0})
    engines[1].load_scale_state(engines[0].scale_state)
    assert engines[1].scale_state == {"loss_scale": 8.0, "loss_scale_calm": 3}
    engines[1].load_scale_state({})
    assert engines[1].scale_state == engines[0].scale_state
    full_engine = engine_of()
    full_engine.load_scale_state(engines[0].scale_state)
    assert full_engine.scale_state == {}


def test_a_batch_whose_sequences_cannot_be_split_is_refused() -> None:
    parallel = ParallelSettings(mesh=MeshShape(tp=2), sequence_parallel=True)
    engine = Engine(dataclasses.replace(engine_of().rank_model, parallel=parallel))
    for call in (engine.step, engine.evaluate):
        with pytest.raises(InvalidInput, match="FN-1271"):
            call(batch())


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_an_objective_adds_up_over_any_division(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num = sum(sizes)
    logits = torch.randn(num, 4, 7, dtype=torch.float64, generator=generator)
    tokens = torch.randint(NO_TOKEN, 7, (num, 4), generator=generator)
    for objective, outputs, targets in (
        (TOKENS, logits, tokens),
        (sample_objective(cross_entropy), logits[:, 0], tokens[:, 0].clamp(min=0)),
    ):
        pieces = list(zip(outputs.split(sizes), targets.split(sizes), strict=True))
        total = sum(objective.loss_sum(*piece) for piece in pieces)
        assert float(total) == pytest.approx(float(objective.loss_sum(outputs, targets)), abs=1e-10)
        assert sum(int(objective.count(piece[1])) for piece in pieces) == int(objective.count(targets))


def test_a_model_of_no_library_needs_a_layout() -> None:
    with pytest.raises(UnsupportedModel, match="FN-1217"):
        pretrained_model(Decoder(CONFIG))


def test_a_mesh_needs_its_processes() -> None:
    with pytest.raises(InvalidInput, match="FN-1266"):
        engine_of(mesh=MeshShape(tp=2))


def on_first_rank(function: Callable[..., tuple[int, ...]], mesh: str) -> tuple[int, ...]:
    """Return what a function sees on the first rank of a mesh without other ranks, in a process of its own.

    DTensor keeps the groups of a mesh that it has seen.
    """
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_call_on_first_rank, (function, mesh))


def _call_on_first_rank(function: Callable[..., tuple[int, ...]], mesh: str) -> tuple[int, ...]:
    parallel = ParallelSettings(mesh=MeshShape.parse(mesh), microbatches=2)
    dist.init_process_group("fake", rank=0, world_size=parallel.mesh.num_ranks, store=FakeStore())
    return function(TrainableModel(module=Decoder(CONFIG, seed=1), layout=decoder_layout(CONFIG)), parallel)


def remaining_parameters(model: TrainableModel, parallel: ParallelSettings) -> tuple[int, ...]:
    """Hold the model, build a rank, and return (whole parameters that still exist, those in the rank's parts)."""
    # Objects from before are not searched.
    gc.freeze()
    references = [weakref.ref(value) for value in model.module.parameters()]
    engine = build_engine(model, parallel, TRAINING, build_mesh(parallel.mesh, parallel.mesh.num_ranks))
    gc.collect()
    alive = {id(ref()) for ref in references if ref() is not None}
    return len(alive), len(alive & {id(value) for part in engine.parts.values() for value in part.parameters()})


@pytest.mark.parametrize(("mesh", "expected"), [("pp=2", (10, 10)), ("pp=2,dp_shard=2", (0, 0)), ("pp=2,tp=2", (0, 0))])
def test_a_rank_of_a_pipeline_keeps_nothing_but_its_part(mesh: str, expected: tuple[int, int]) -> None:
    assert on_first_rank(remaining_parameters, mesh) == expected


class Moves(TorchDispatchMode):
    """Counts the values that are moved to the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.num_moved = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Count the values of one operation."""
        options = dict(kwargs or {})
        if options.get("device") == torch.device("meta") and isinstance(args[0], Tensor):
            self.num_moved += (args[0].to_local() if isinstance(args[0], DTensor) else args[0]).numel()
        return func(*args, **options)


def moved_values(model: TrainableModel, parallel: ParallelSettings) -> tuple[int, ...]:
    """Return (values that the building of a rank moves to its device, values of its part)."""
    mesh = build_mesh(parallel.mesh, parallel.mesh.num_ranks)
    with Moves() as moves:
        engine = build_engine(model, parallel, TRAINING, mesh, torch.device("meta"))
    return moves.num_moved, sum(
        (value.to_local() if isinstance(value, DTensor) else value).numel() for value in engine.parts[0].parameters()
    )


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2", "dp_shard=2,tp=2"])
def test_no_device_receives_values_before_they_are_split(mesh: str) -> None:
    total = sum(value.numel() for value in Decoder(CONFIG, seed=1).parameters())
    num_moved, part_total = on_first_rank(moved_values, mesh)
    assert part_total < total
    # FSDP2 itself moves one layer at a time to the device of its mesh.
    assert num_moved == (part_total if mesh == "tp=2" else 0)


def offloaded_parameters(model: TrainableModel, parallel: ParallelSettings) -> tuple[int, ...]:
    """Return (parameters that FSDP2 moves to the device of a rank only for each use, number of all parameters)."""
    mesh = build_mesh(parallel.mesh, parallel.mesh.num_ranks)
    engine = build_engine(model, dataclasses.replace(parallel, offload=True), TRAINING, mesh)
    states = [module._get_fsdp_state() for module in engine.parts[0].modules() if isinstance(module, FSDPModule)]
    offload_flags = [
        value.offload_to_cpu for state in states for group in state._fsdp_param_groups for value in group.fsdp_params
    ]
    return sum(offload_flags), len(offload_flags)


def test_offloaded_parameters_are_not_kept_on_the_device() -> None:
    num_offloaded, num_all = on_first_rank(offloaded_parameters, "dp_shard=2")
    assert num_offloaded == num_all == len(list(Decoder(CONFIG, seed=1).parameters()))


@pytest.mark.nightly
# torch 2.13 warns of what its own compiler does.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_a_compiled_model_is_the_same(recompute: str) -> None:
    torch.compiler.reset()
    counters.clear()
    reference, engine = engine_of(), engine_of(compile=True, recompute=recompute)
    for _ in range(3):
        assert float(engine.step(batch()).loss) == pytest.approx(float(reference.step(batch()).loss), abs=1e-10)
    assert counters["stats"]["unique_graphs"] == 1
