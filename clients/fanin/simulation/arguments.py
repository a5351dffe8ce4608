"""The arguments of ``simulate``: all checks that need no export, and the Plan."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypedDict

import numpy as np
import numpy.typing as npt

from fanin.clients.data.examples import Examples, NamedArrays, Y, check_examples
from fanin.clients.planfile import Override, parse_plan
from fanin.edge.codecs.scaffold import NUM_DEVICES, declared_devices, named_devices
from fanin.edge.codecs.stage import Stage
from fanin.edge.metrics.declared import declared_metrics
from fanin.edge.metrics.metric import metrics_of
from fanin.edge.runtimes.evaluations import OF_VALIDATION, OF_VALIDATIONS
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.plans import DATA as OF_DATA
from fanin.protos.plans import EvaluationPlan, Plan
from fanin.server.evaluation.metrics import check_best
from fanin.server.rounds.targets import check_target
from fanin.server.runs.admission import TrainFacts, check_training
from fanin.simulation.backends.opening import check_backend
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.devices.models import DeviceModel
from fanin.simulation.engines.choice import check_engine
from fanin.simulation.settings import SimulationSettings, is_integer, keys_of
from fanin.simulation.studies.tests import check_client_tests, check_tests

if TYPE_CHECKING:
    from fanin.edge.export.app.app import App

UNIFORM: Final = "uniform"
"""The default of ``cohort.selection``."""
QUORUM: Final = "cohort.quorum"
TARGET: Final = "stop.target"
DATA: Final = "evaluation.data"
RANGES: Final = "int8.ranges"
REPORT_FACTOR: Final = "cohort.report_factor"
OF_GRAPHS: Final = ("metrics", "baseline", "resume", "trainer", "work", "client_test", "fine_tune")
"""Settings that need the graphs of an App."""


class CheckedArguments(TypedDict):
    """The arguments of a simulation of an App."""

    app: "App"
    clients: Partition


def check_arguments(app: object, clients: object, settings: SimulationSettings) -> CheckedArguments:
    """Return the App and its clients. Raises InvalidInput unless the model can use the examples, and the settings are
    valid.
    """
    from fanin.edge.export.app.app import App

    if not isinstance(app, App) or not isinstance(clients, Partition):
        raise InvalidInput(
            f"simulate: got {type(app).__name__} and {type(clients).__name__}, expected an App and a Partition, or a "
            "Flower app and a number of clients; see fanin.edge.export.App and fanin.simulation.partition",
            code="FN-1170",
        )
    check_settings(settings)
    if settings.initial is not None and not isinstance(settings.initial, Mapping):
        raise InvalidInput(
            f"simulate: initial: got {type(settings.initial).__name__}, expected a state_dict of the App's module",
            code="FN-1171",
        )
    if settings.keep:
        raise InvalidInput(
            "simulate: keep: got it with an App, expected none; name its personal parameters by Recipe(local=[...])",
            code="FN-1171",
        )
    check_tests(settings.tests, of_flower=False)
    check_client_tests(settings.client_test, settings.fine_tune, len(clients))
    _check_data(app, clients, settings)
    return CheckedArguments(app=app, clients=clients)


def plan_of(name: str, num_clients: int, limits: Mapping[str, int | None], settings: SimulationSettings) -> Plan:
    """Return the Plan of a simulation.

    Args:
        name: The name of the model.
        num_clients: The number of clients.
        limits: The arguments ``cohort`` and ``rounds``. All are None if the settings have a Plan.
        settings: The settings.

    Raises:
        InvalidPlan: A key is unknown, or a value is wrong. The message names the argument.
        InvalidInput: An argument is missing, or the cohort is larger than the number of clients.
    """
    plan = _with_selection(_plan(name, limits, settings), settings)
    _check_evaluation(plan.evaluation, settings)
    _check_validation(plan, settings)
    if plan.cohort.concurrency > num_clients:
        raise InvalidInput(
            f"simulate: got a cohort of {plan.cohort.concurrency}, expected at most the {num_clients} clients",
            code="FN-1177",
        )
    return plan


def check_devices(plan: Plan, num_clients: int) -> None:
    """Raise InvalidPlan if a stage declares another number of devices than the simulation has."""
    declared = declared_devices(plan.stages)
    if declared not in (None, num_clients):
        raise InvalidPlan(
            f"simulate: plan: stages: {named_devices(plan.stages)}: got {NUM_DEVICES} {declared} and {num_clients} "
            f"clients, expected {NUM_DEVICES} {num_clients}: it counts all clients",
            code="FN-1178",
        )


def _plan(name: str, limits: Mapping[str, int | None], settings: SimulationSettings) -> Plan:
    cohort, rounds = limits["cohort"], limits["rounds"]
    if isinstance(settings.plan, Plan):
        if cohort is not None or rounds is not None:
            raise InvalidInput(
                "simulate: got a Plan and cohort or rounds, expected them in the Plan alone; remove the arguments",
                code="FN-1175",
            )
        return settings.plan
    if cohort is None or rounds is None:
        raise InvalidInput(
            "simulate: got no cohort or no rounds, expected both; pass them, or set plan to a Plan that has them",
            code="FN-1175",
        )
    keys = keys_of(settings.plan)
    twice = {"cohort.concurrency": "cohort", "stop.max_rounds": "rounds", "training.seed": "seed"}
    for key in twice.keys() & keys.keys():
        raise InvalidPlan(f"simulate: plan: got {key} and the argument {twice[key]}; remove the key", code="FN-1175")
    overrides = [
        *_data_of(keys, settings),
        Override(path="name", value=name, source="app"),
        Override(path="bundle", value="bundle", source="app"),
        Override(path="cohort.concurrency", value=cohort, source="cohort"),
        Override(path="training.seed", value=settings.seed, source="seed"),
        Override(path="stop.max_rounds", value=rounds, source="rounds"),
        *keys.values(),
    ]
    try:
        plan = parse_plan("", "plan", overrides).plan
    except InvalidPlan as exc:
        raise InvalidPlan(f"simulate: {exc}", code=exc.code) from exc
    return with_half_quorum(plan, keys.keys())


def _data_of(keys: Mapping[str, Override], settings: SimulationSettings) -> list[Override]:
    """Return the data set of keys that need one: the test examples. Raises InvalidInput without any."""
    needing = [key for key in keys if key == TARGET or (key == RANGES and keys[key].value == OF_DATA)]
    if not needing or DATA in keys:
        return []
    if settings.test is None:
        raise InvalidInput(
            f"simulate: got {needing[0]} {keys[needing[0]].value!r} in the plan, and no test examples, which are the "
            "data set of a simulation; set test in the settings, or remove the key",
            code="FN-1887",
        )
    return [Override(path=DATA, value="test", source=needing[0])]


def with_half_quorum(plan: Plan, keys: Collection[str]) -> Plan:
    """Return a Plan whose Rounds close at the deadline with half of their Updates, except for keys that are set.

    If all clients are in the cohort, no other client can replace one that fails. Slow clients are waited for: virtual
    time costs nothing, and a result must not depend on the default of a wait.
    """
    cohort = plan.cohort
    quorum = cohort.quorum if QUORUM in keys else (cohort.buffer + 1) // 2
    report_factor = cohort.report_factor if REPORT_FACTOR in keys else math.inf
    return replace(plan, cohort=replace(cohort, quorum=quorum, report_factor=report_factor))


def _with_selection(plan: Plan, settings: SimulationSettings) -> Plan:
    """Return the Plan with the selection policy of the settings, if they have one. Raises InvalidInput."""
    for name in settings.own_policies:
        if plan.cohort.selection not in (UNIFORM, name):
            raise InvalidInput(
                f"simulate: selection: got {name} and the plan's cohort.selection {plan.cohort.selection!r}, expected "
                "one of them; remove the other",
                code="FN-1175",
            )
        plan = replace(plan, cohort=replace(plan.cohort, selection=name))
    return plan


def check_validation_fraction(fraction: float) -> None:
    """Raise InvalidInput for a share that clients cannot hold out."""
    if not 0.0 <= fraction < 1.0:
        raise InvalidInput(
            f"simulate: got a validation fraction of {fraction:g}, expected at least 0 and less than 1: the share of "
            "its examples on which each client evaluates the Versions",
            code="FN-1179",
        )


def _check_validation(plan: Plan, settings: SimulationSettings) -> None:
    """Raise InvalidInput for keys that read the clients' evaluations, if the clients hold nothing out."""
    if settings.validation_fraction:
        return
    used = [key for key in ("patience", "max_int8_drop") if getattr(plan.stop, key)]
    keys = [f"stop.{key}" for key in used] + [
        f"the statistic {each.name}" for each in plan.statistics if each.name.startswith(OF_VALIDATIONS)
    ]
    if keys:
        raise InvalidInput(
            f"simulate: got {keys[0]} in the plan and validation_fraction 0, expected a share above 0: the key needs "
            "the evaluations of the clients",
            code="FN-1179",
        )


def _check_evaluation(evaluation: EvaluationPlan, settings: SimulationSettings) -> None:
    if (evaluation.data or evaluation.metrics) and not settings.tests:
        raise InvalidInput(
            "simulate: got a plan with [evaluation] data or metrics, and no test examples; set test in the settings: "
            "they are the data on which a simulation evaluates Versions",
            code="FN-1181",
        )
    if missing := sorted({each.name for each in evaluation.sets} - settings.tests.keys()):
        raise InvalidInput(
            f"simulate: test: got a plan with evaluation.sets {', '.join(missing)}, and no test examples of that name; "
            "set test in the settings to examples by name, the first of which are those of evaluation.data",
            code="FN-1846",
        )
    own = settings.own_metrics
    metrics_of(metric.name for metric in evaluation.metrics if metric.name not in own)


def check_plan(app: "App", plan: Plan, stages: Mapping[str, Stage], settings: SimulationSettings) -> None:
    """Check a Plan's requirements for the App's train graphs and for metrics.

    Raises:
        InvalidPlan: The train graphs cannot carry out the Plan, a metric is not installed, or none has the name in
            ``evaluation.best``.
        InvalidInput: A metric of the settings would never be computed.
    """
    own, declared = settings.own_metrics, declared_metrics(each.name for each in plan.statistics)
    further = metrics_of({each.name for each in plan.evaluation.metrics} - own.keys())
    metrics_of(declared - own.keys())
    if not settings.tests and (unused := sorted(own.keys() - declared)):
        raise InvalidInput(
            f"simulate: metrics: got {unused} and no test examples, expected data to compute them on; set test in the "
            f"settings, or declare a statistic such as {OF_VALIDATION}{unused[0]} in the plan",
            code="FN-1181",
        )
    if settings.tests:
        sets, names = [*filter(None, settings.tests)], {*further, *own}
        check_best(plan.evaluation.best, names, sets=sets, has_labels=bool(app.num_classes))
        check_target(plan, {**further, **own})
    check_training("simulate", plan, stages, facts_of(app))


def facts_of(app: "App") -> TrainFacts:
    """Return the settings that a Plan may change in the train graphs that an App will have."""
    recipe = app.recipe
    return TrainFacts(
        has_proximal=recipe.proximal,
        has_local=bool(recipe.local),
        has_control=recipe.scaffold,
        optimizer=recipe.optimizer.settings,
        batch_sizes=tuple(sorted((app.batch_size, *app.other_batch_sizes))),
        states=frozenset(recipe.optimizer.states),
    )


def check_settings(settings: SimulationSettings) -> None:
    """Raise InvalidInput unless the settings are valid."""
    if not isinstance(settings.devices, DeviceModel):
        raise InvalidInput(
            f"simulate: devices: got {type(settings.devices).__name__}, expected DeviceModel; read_devices(path) reads "
            "one from a file",
            code="FN-1156",
        )
    several: object = () if settings.seeds is None else settings.seeds
    if not isinstance(several, Sequence) or not all(map(is_integer, several)):
        raise InvalidInput(f"simulate: seeds: got {several!r}, expected a sequence such as (0, 1, 2)", code="FN-1172")
    check_validation_fraction(settings.validation_fraction)
    check_backend(settings.processes, settings.cluster, settings.engine)
    check_engine(settings)
    _check_trainer(settings)
    if not is_integer(settings.keep_versions) or settings.keep_versions < 1:
        raise InvalidInput(
            f"simulate: keep_versions: got {settings.keep_versions!r}, expected an integer of 1 or more: the number of "
            "newest Versions whose parameters the result has",
            code="FN-1886",
        )
    if not is_integer(settings.seed) or settings.seed < 0:
        raise InvalidInput(f"simulate: got seed {settings.seed!r}, expected an integer of 0 or more", code="FN-1172")
    seeds = list(settings.seeds or ())
    if any(seed < 0 for seed in seeds):
        raise InvalidInput(f"simulate: seeds: got {seeds}, expected integers of 0 or more", code="FN-1172")
    if repeated := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        raise InvalidInput(
            f"simulate: seeds: got {seeds}, expected each seed once, because one seed always has the same result; "
            f"remove the repetitions of {', '.join(map(str, repeated))}",
            code="FN-1173",
        )
    if seeds and settings.seed:
        raise InvalidInput(
            f"simulate: got seeds {seeds} and seed {settings.seed}, expected one of them; remove seed", code="FN-1173"
        )


def _check_trainer(settings: SimulationSettings) -> None:
    """Raise InvalidInput for something that is no factory of trainers, or for settings that it does not go with."""
    if settings.trainer is None:
        return
    if not callable(settings.trainer):
        raise InvalidInput(
            f"simulate: trainer: got {type(settings.trainer).__name__}, expected a class or a function that returns a "
            "Trainer for the examples of a client; write trainer=lambda store: MyTrainer(store)",
            code="FN-1881",
        )
    if settings.resume is not None:
        raise InvalidInput(
            "simulate: got trainer and resume, expected one of them: the record of the trainings does not know the "
            "code of a trainer; remove resume",
            code="FN-1884",
        )


def check_flower_settings(settings: SimulationSettings) -> None:
    """Raise InvalidInput if a setting is set that only an App has, or a test set is no function."""
    check_tests(settings.tests, of_flower=True)
    unused = [name for name in OF_GRAPHS if getattr(settings, name) not in (None, False, {})]
    unused += ["engine"] if settings.engine != "graph" else []
    unused += ["devices.examples_per_s"] if settings.devices.has("examples_per_s") else []
    if unused:
        raise InvalidInput(
            f"simulate: got {', '.join(unused)} with a Flower app, expected none of them: the app trains and evaluates "
            "by itself, and no graphs exist; remove them (docs/tutorials/from-flower.md)",
            code="FN-1183",
        )


def _check_data(app: "App", clients: Partition, settings: SimulationSettings) -> None:
    """Raise InvalidInput unless the model can use the examples. ``preprocess`` checks the shape of raw ones."""
    target, dtype = app.target_shape, str(app.target_dtype).removeprefix("torch.")
    tests = settings.tests
    named = {f"test: {name}" if name else "test": each for name, each in tests.items() if isinstance(each, Examples)}
    if settings.client_test is not None:
        named["client_test"] = settings.client_test.examples
    for what, examples in {"clients": clients.examples, **named}.items():
        for name, value in app.inputs.items():
            accepted = {str(part.dtype).removeprefix("torch.") for part in (value, app.raw_data) if part is not None}
            if name in examples.inputs and str(examples.inputs[name].dtype) not in accepted:
                raise InvalidInput(
                    f"simulate: {what}: got {name} {examples.inputs[name].dtype}, expected "
                    f"{' or '.join(sorted(accepted))} as in the App's calibration or raw data; write "
                    f"{name} = {name}.astype(np.{min(accepted)})",
                    code="FN-1184",
                )
        if app.preprocess is None:
            shapes = _shapes_like(app, examples.inputs)
            check_examples(examples, shapes, app.num_classes, dtype, f"simulate: {what}")
        if target is not None and (expected := _like(app, Y, target, examples.y)) != examples.y.shape[1:]:
            raise InvalidInput(
                f"simulate: {what}: got y of shape {_batch(examples.y.shape[1:])}, expected {_batch(expected)} as the "
                f"module returns {'logits' if app.num_classes else 'values'} for it; {_advice(examples, expected)}",
                code="FN-1184",
            )
        if app.lengths is not None:
            try:
                app.lengths.sizes_of({**examples.inputs, Y: examples.y})
            except ValueError as exc:
                raise InvalidInput(f"simulate: {what}: {exc}", code="FN-1185") from exc


def _shapes_like(app: "App", inputs: NamedArrays) -> dict[str, tuple[int, ...]]:
    """Return the shape of one sample by input of an App. Where a shape has a length, it is that of the data."""
    return {
        name: _like(app, name, shape, inputs[name]) if name in inputs else shape
        for name, shape in app.input_shapes.items()
    }


def _like(app: "App", name: str, shape: tuple[int, ...], array: npt.NDArray[np.generic]) -> tuple[int, ...]:
    return shape if app.lengths is None else app.lengths.shape_like(name, (-1, *shape), array.shape)[1:]


def _batch(shape: tuple[int, ...]) -> str:
    return f"({', '.join(['n', *map(str, shape)])}{'' if shape else ','})"


def _advice(examples: Examples, target: tuple[int, ...]) -> str:
    if examples.y[0].size == math.prod(target):
        return f"reshape it with y.reshape{_batch(target).replace('(n', '(-1')}"
    return "give the module an output for each target"
