"""The config of a job: how it is read, and that wrong values are refused before a process starts."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanin.datacenter.config.communication import CommunicationSettings
from fanin.datacenter.config.rates import RateSettings
from fanin.datacenter.config.train_config import TrainConfig, check_config, parse_config, read_train_config
from fanin.datacenter.files.jobfiles import read_config, write_config
from fanin.datacenter.jobs.launch import launch
from fanin.datacenter.parallel.settings import ParallelSettings, TrainingSettings
from fanin.datacenter.ranks.mesh import MeshShape
from fanin.protos.errors import InvalidInput

EXAMPLES = [Path(__file__).parents[2] / "examples" / name / "train.toml" for name in ("char_decoder", "masked_encoder")]
MINIMAL = """
[model.decoder]
[data]
text = "tinyshakespeare"
[training]
batch_size = 8
learning_rate = 1
[stop]
steps = 2
"""
SGD = MINIMAL.replace("batch_size", "optimizer = 'sgd'\nbatch_size")
COPIES = f"{MINIMAL}[parallel]\nmesh = 'dp_replicate=2'\n[communication]\n"
ADASCALE = "[rate]\nscale = 'adascale'\nbase_batch = 2\n"
APP = """
model = { app = "a:b" }
data = { examples = "x.npz" }
training = { batch_size = 8, learning_rate = 0.1 }
stop = { epochs = 1 }
"""


def test_missing_keys_have_defaults_and_integers_are_numbers() -> None:
    config = parse_config(MINIMAL, "m.toml")
    assert config.training.learning_rate == 1.0
    assert type(config.training.learning_rate) is float
    assert config.parallel == ParallelSettings()
    assert config.seed == 0


def test_override_tables_replace_values_of_the_text() -> None:
    config = parse_config(MINIMAL, "m.toml", {"parallel": {"mesh": "tp=2"}, "stop": {"steps": 5}, "checkpoints": {}})
    assert (config.parallel.mesh, config.stop.steps, config.stop.epochs) == (MeshShape(tp=2), 5, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (APP.replace('{ app = "a:b" }', "3"), "model: got 3, expected a table"),
        ("x", "not TOML ("),
        (f"{MINIMAL}[trainin]", "got unknown key 'trainin', did you mean 'training'?"),
        (f"qqqqq = 1\n{MINIMAL}", "got unknown key 'qqqqq', expected some of model, data"),
        (f"{MINIMAL}step = 3", "[stop]: got unknown key 'step', did you mean 'steps'?"),
        (
            MINIMAL.replace("[model.decoder]", "[model.decoder]\nwidht = 8"),
            "[model.decoder]: got unknown key 'widht', did",
        ),
        (MINIMAL.replace("batch_size = 8", ""), "[training]: got no batch_size, expected a value"),
        (MINIMAL.replace("batch_size = 8", "batch_size = true"), "training.batch_size: got True, expected int"),
        (MINIMAL.replace("batch_size = 8", "batch_size = 8.5"), "training.batch_size: got 8.5, expected int"),
        (MINIMAL.replace("batch_size = 8", "batch_size = 0"), "training: got batch_size 0, expected at least 1"),
        (f"{MINIMAL}[parallel]\nmesh = 'pp'", "mesh: got 'pp' in 'pp', expected each of pp, dp_replicate"),
        (f"{MINIMAL}[parallel]\nrecompute = 'some'", "parallel.recompute: got 'some', expected one of none, full"),
        (f"{MINIMAL}[parallel]\nlayer_times = [1, 'x']", "parallel.layer_times[1]: got 'x', expected float"),
        (f"{MINIMAL}[parallel]\nlayer_times = 1", "parallel.layer_times: got 1, expected a list"),
        (f"{MINIMAL}[parallel]\nlayer_times = 'x'", "parallel.layer_times: got 'x', expected one of measure"),
        (MINIMAL.replace("batch_size", "betas = [0.9]\nbatch_size"), "training.betas: got [0.9], expected a list of 2"),
        (f"{MINIMAL}[watch]\nhang_after_s = 0", "watch: got hang_after_s 0.0, expected a positive number of seconds"),
        (f"{MINIMAL}[watch]\nhang_after_s = 1e14", "watch: got hang_after_s 100000000000000.0, expected a positive"),
        (f"{MINIMAL}[rate]\nscale = 'linear'", "rate: got scale 'linear' and base_batch 0"),
        (f"{MINIMAL}[rate]\nfloor = 1.5", "rate: got floor 1.5"),
        (f"{MINIMAL}[rate]\nwarm_up = -1", "rate: got warm_up -1"),
        (f"{MINIMAL}[checkpoints]\nevery = 2", "checkpoints: got every 2 and no folder"),
        (f"{MINIMAL}[checkpoints]\nkeep = 0", "checkpoints: got every 0 and keep 0"),
        (
            f"{MINIMAL}[evaluation]\nkeep = 'best'\n[checkpoints]\nfolder = 'c'",
            "got keep 'best' and a folder of checkpoints",
        ),
        (f"{MINIMAL}[evaluation]\npatience = -1", "evaluation: got patience -1"),
        (f"{MINIMAL}[evaluation]\nmin_delta = nan", "evaluation: got min_delta nan"),
        (MINIMAL.replace("steps = 2", "steps = 0"), "stop: got steps 0 and epochs 0, expected at least one above 0"),
        (f"seed = -1\n{MINIMAL}", "training: got seed -1"),
        (f"seed = {2**64}\n{MINIMAL}", "training: got seed 18446744073709551616, expected 0 to 2^64 - 1"),
        (f"{MINIMAL}[checkpoints]\nweights = 'a\\u0000b'".replace("'", '"'), r"checkpoints.weights: got 'a\x00b'"),
        (f"{MINIMAL}[checkpoints]\nfolder = 'a\\u0000b'".replace("'", '"'), r"checkpoints.folder: got 'a\x00b'"),
        (f"{MINIMAL}[watch]\nhang_after_s = 1{'0' * 400}", "watch.hang_after_s: got 401 digits, expected a number"),
        (MINIMAL.replace("[data]", "[data]\nlength = 0"), "data: got length 0"),
        (MINIMAL.replace("[data]", "[data]\nheld_fraction = 1.0"), "data: got held_fraction 1.0"),
        (
            MINIMAL.replace("[data]", "[data]\nexamples = 'x'"),
            "data: got text and examples, expected one of text, tokens, examples",
        ),
        (APP.replace('examples = "x.npz"', ""), "data: got nothing, expected one of text, tokens, examples"),
        (APP.replace('app = "a:b"', ""), "model: got nothing, expected one of app, decoder, encoder, pretrained"),
        (
            APP.replace('app = "a:b"', 'app = "a:b", decoder = {}'),
            "model: got app and decoder, expected one of app, decoder",
        ),
        (
            MINIMAL.replace("[data]", "[data]\ntokens = 'x.bin'").replace('text = "', '# "'),
            "expected a file in .npy or",
        ),
        (
            f"{MINIMAL}[model.layout]\nlayers = 'l'\nnum_layers = 1",
            "model: got a layout and [model.decoder], expected a layout only for an",
        ),
        (APP.replace('app = "a:b"', 'app = "a:b", mean_over = "tokens"'), "model: got mean_over 'tokens' for an App"),
        (
            APP.replace('app = "a:b"', 'app = "a:b", layout = { layers = "l", num_layers = 1, plan = { x = "col" } }'),
            "layout: got x = 'col', expected one of shared, column",
        ),
        (
            APP.replace('app = "a:b"', 'app = "a:b", layout = { layers = "", num_layers = 1 }'),
            "layout: got layers '' and num_layers 1",
        ),
        (f"{MINIMAL}[communication]\nhook = 'fp16'", "communication: got hook 'fp16' and local_period 0 for mesh none"),
        (f"{MINIMAL}[communication]\nrank = 0", "communication: got rank 0"),
        (
            f"{COPIES}hook = 'powersgd'\n[watch]\ntraffic = true",
            "watch: got traffic, hook 'powersgd' and local_per",
        ),
        (
            f"{MINIMAL}[communication]\nhook = 'bf16'\nlocal_period = 2",
            "expected one of them: in local steps no gradient",
        ),
    ],
    ids=lambda text: re.sub(r"\W+", "-", text)[-40:],
)
def test_invalid_configs_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as excinfo:
        parse_config(text, "m.toml")
    assert str(excinfo.value).startswith("m.toml: ")
    assert message in str(excinfo.value)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"parallel": {"mesh": "tp=2"}}, "for mesh tp=2 (replicate 'ddp'), 1 microbatches and no communication hook"),
        ({"parallel": {"mesh": "dp_replicate=4", "replicate": "hsdp"}}, "for mesh dp_replicate=4 (replicate 'hsdp')"),
        ({"parallel": {"microbatches": 2}}, "2 microbatches and no communication hook, expected one process, or"),
        ({"parallel": {"mesh": "dp_replicate=4"}, "communication": {"hook": "bf16"}}, "and a communication hook, exp"),
        (
            {"training": {"optimizer": "adamw"}},
            "optimizer 'adamw' and precision 'full', expected sgd, and full",
        ),
        (
            {"parallel": {"precision": "fp16"}},
            "optimizer 'sgd' and precision 'fp16', expected sgd, and full, double or bf16",
        ),
        ({"training": {"accumulate": 2}}, "base_batch 2 and batch_size 8, expected 2 or more parts of base_batch"),
        (
            {"rate": {"base_batch": 8}, "training": {"accumulate": 1}},
            "one for each of 1 copies x 1 gradient accumulation steps; change",
        ),
        (
            {"parallel": {"mesh": "dp_replicate=2"}},
            "one for each of 2 copies x 4 gradient accumulation steps; change accumulate",
        ),
    ],
    ids=lambda value: re.sub(r"\W+", "-", str(value))[-40:],
)
def test_adascale_needs_parts_with_separate_gradients(tables: Mapping[str, object], message: str) -> None:
    text = SGD.replace("batch_size", "accumulate = 4\nbatch_size") + ADASCALE
    assert parse_config(text, "m.toml").rate.scale == "adascale"
    with pytest.raises(InvalidInput, match=re.escape(message)):
        parse_config(text, "m.toml", tables)


@pytest.mark.parametrize(
    ("mesh", "processes", "message"),
    [
        ("none", 0, "got 0 processes, expected at least 1"),
        ("tp=2", 1, "= 2 ranks, got a world of 1; start 2 processes or change the mesh"),
        ("tp=8", 8, "got heads 4 and tp 8, expected a multiple"),
        ("pp=8", 8, "got 4 layers for 8 stages, expected at least one each"),
        ("dp_shard=3", 3, "got batch 8, expected a multiple of 3 parts x 1 accumulation steps x 1 microbatches = 3"),
        ("pp=4", 4, "1F1B needs at least as many microbatches as the 4 stages, got 1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_all_numbers(mesh: str, processes: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        schedule = "GPipe" if mesh == "pp=8" else "1F1B"
        text = MINIMAL.replace("[model.decoder]", "[model.decoder]\nnum_heads = 4\nnum_layers = 4")
        check_config(parse_config(text, "m.toml", {"parallel": {"mesh": mesh, "schedule": schedule}}), processes)


def test_a_sequence_that_ranks_cannot_split_is_refused_before_they_start() -> None:
    tables = {"parallel": {"mesh": "tp=2", "sequence_parallel": True}}
    check_config(parse_config(MINIMAL, "m.toml", tables | {"data": {"length": 62}}), 2)
    with pytest.raises(InvalidInput, match="FN-1271"):
        check_config(parse_config(MINIMAL, "m.toml", tables | {"data": {"length": 63}}), 2)


def test_an_app_without_names_can_be_copied_and_sharded_only() -> None:
    for mesh in ("dp_replicate=2", "dp_shard=2", "dp_replicate=2,dp_shard=2"):
        config = parse_config(APP, "a.toml", {"parallel": {"mesh": mesh}})
        check_config(config, config.parallel.mesh.num_ranks)
    for mesh in ("tp=2", "pp=2"):
        config = parse_config(APP, "a.toml", {"parallel": {"mesh": mesh, "microbatches": 2}})
        with pytest.raises(InvalidInput, match="FN-1268"):
            check_config(config, 2)


def test_an_evaluations_batch_is_divided_too() -> None:
    config = parse_config(APP, "a.toml", {"parallel": {"mesh": "dp_shard=2"}, "evaluation": {"batch_size": 5}})
    with pytest.raises(InvalidInput, match="FN-1245"):
        check_config(config, 2)


@given(batch=st.integers(1, 4), accumulate=st.integers(1, 3), size=st.integers(0, 12))
def test_a_folded_schedule_is_evaluated_with_batches_of_one_size(batch: int, accumulate: int, size: int) -> None:
    step_size = 4 * batch
    tables = {
        "training": {"batch_size": step_size * accumulate, "accumulate": accumulate},
        "parallel": {"mesh": "pp=2,dp_shard=2", "schedule": "ZBV", "microbatches": 2},
        "evaluation": {"batch_size": 4 * size},
    }
    config = parse_config(MINIMAL.replace("[model.decoder]", "[model.decoder]\nnum_layers = 4"), "m.toml", tables)
    if 4 * size in (0, step_size):
        check_config(config, 4)
        assert config.evaluation_size == step_size
        return
    message = rf"evaluation: got batch_size {4 * size} and schedule ZBV, expected {step_size} \(batch"
    with pytest.raises(InvalidInput, match=message):
        check_config(config, 4)
    gpipe_config = replace(config, parallel=replace(config.parallel, schedule="GPipe"))
    check_config(gpipe_config, 4)
    assert gpipe_config.evaluation_size == 4 * size


def test_copies_are_evaluated_only_where_they_are_equal() -> None:
    tables = {"parallel": {"mesh": "dp_replicate=2"}, "communication": {"local_period": 4}}
    for every in (0, 6):
        with pytest.raises(InvalidInput, match=f"got local_period 4, an evaluation every {every} and a checkpoint"):
            parse_config(APP, "a.toml", tables | {"evaluation": {"every": every}})
    assert parse_config(APP, "a.toml", tables | {"evaluation": {"every": 8}}).communication.local_period == 4


@pytest.mark.parametrize("settings", [{"hook": "powersgd"}, {"local_period": 4}])
def test_a_checkpoint_is_refused_where_copies_have_state_of_their_own(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    tables = {"parallel": {"mesh": "dp_replicate=2"}, "communication": settings, "evaluation": {"every": 4}}
    checkpoint_tables = {"checkpoints": {"folder": str(tmp_path / "kept")}}
    with pytest.raises(InvalidInput, match="FN-1257"):
        launch(parse_config(APP, "a.toml", tables | checkpoint_tables), 2, tmp_path / "job")
    assert not list(tmp_path.iterdir()), "told before anything starts"
    for overrides in (tables, tables | checkpoint_tables | {"communication": {"hook": "bf16"}}):
        assert parse_config(APP, "a.toml", overrides)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.parent.name)
def test_the_examples_are_valid_configs(tmp_path: Path, example: Path) -> None:
    config = read_train_config(example)
    check_config(config, 1)
    check_config(replace(config, parallel=replace(config.parallel, mesh=MeshShape.parse("pp=2,dp_shard=2,tp=2"))), 8)
    with pytest.raises(InvalidInput, match="FN-1201"):
        read_train_config(tmp_path / "none.toml")


training_settings = st.builds(
    TrainingSettings,
    batch_size=st.integers(1, 99),
    learning_rate=st.floats(1e-6, 1e3),
    clip_norm=st.none() | st.floats(0.1, 9.0),
    freeze=st.lists(st.text("ab.*", min_size=1).filter(lambda text: text.strip("*")), max_size=2).map(tuple),
)
copy_meshes = st.builds(MeshShape, dp_replicate=st.integers(2, 9))


@given(
    training=training_settings,
    mesh=copy_meshes,
    reshard=st.none() | st.booleans(),
    times=st.lists(st.floats(0.0, 9.0), max_size=3).map(tuple),
    checkpoints=st.none() | st.text("ab/é", min_size=1).map(Path),
    seed=st.integers(0, 2**63),
)
def test_a_config_round_trips_through_a_jobs_folder(
    tmp_path_factory: pytest.TempPathFactory,
    training: TrainingSettings,
    mesh: MeshShape,
    reshard: bool | None,
    times: tuple[float, ...],
    checkpoints: Path | None,
    seed: int,
) -> None:
    base = parse_config(APP, "a.toml")
    config = TrainConfig(
        model=base.model,
        data=base.data,
        training=training,
        stop=base.stop,
        rate=RateSettings(scale="linear", base_batch=3),
        parallel=ParallelSettings(mesh=mesh, reshard=reshard, layer_times=times),
        communication=CommunicationSettings(hook="bf16" if checkpoints else "powersgd"),
        checkpoints=replace(base.checkpoints, folder=checkpoints),
        seed=seed,
    )
    assert read_config(write_config(config, tmp_path_factory.getbasetemp())) == config
