"""The options of a simulation."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import isroutine
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from fanin.clients.device.training.tuning import FineTuning
from fanin.clients.planfile import Override, leaves_of, override_of
from fanin.edge.codecs import codec, stages
from fanin.edge.metrics.graphs import metric_of
from fanin.edge.metrics.metric import Metric, MetricFunction
from fanin.edge.tensors import Array
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.names import check_name, is_name
from fanin.protos.plans import Plan
from fanin.protos.plans.entries import BASE64
from fanin.protos.plans.keys import shown
from fanin.protos.plans.named import PREFIX, Factory, PassedParts, RecordFactory
from fanin.server.aggregation import outer, rules
from fanin.server.selection.policies import POLICIES, SelectionPolicy
from fanin.simulation.backends.ray_cluster import RayCluster
from fanin.simulation.data.partitioning import Partition
from fanin.simulation.devices.models import DeviceModel
from fanin.simulation.devices.work import ClientWork
from fanin.simulation.rows import OnEvent, OnFailure, RoundRow
from fanin.simulation.studies.tests import TestData

if TYPE_CHECKING:
    from fanin.edge.export.module.prepare import Module, StateDict
    from fanin.simulation.result import KeptVersion
    from fanin.simulation.workers import TrainerFactory

STAGES: Final = "stages"
GROUPS: Final = {
    "aggregation.rule": rules.GROUP,
    "aggregation.outer_optimizer": outer.GROUP,
    "codec.name": codec.GROUP,
    STAGES: stages.GROUP,
}
"""The entry point group of the parts of a key."""
WITH_PLAN: Final = (rules.GROUP, outer.GROUP)
"""The groups whose factories receive the Plan before the options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The values that a setting may have: whether one is, and what they are in words."""

    accepts: Callable[[object], bool]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """The options of a simulation.

    Attributes:
        test: Examples on which each Version is evaluated, in float and in int8. The Plan's ``evaluation.every`` and
            ``evaluation.metrics`` apply. Or several sets by name, of which the first is the test data, and each has the
            metrics ``NAME.METRIC``. A set of a Flower app is a function ``(arrays by name) -> values by name``.
        metrics: Metrics of your own by name: a function ``(predictions, targets) -> number``, a ``Metric``, or the path
            of an ONNX graph (docs/howto/evaluate.md). They are computed on ``test``, and for each client on its
            validation part if the Plan declares the statistic ``evaluate.NAME``.
        plan: Further keys of the Plan with their values, by dotted name (docs/reference/plan.md); or a Plan. The keys
            of a rule, an outer optimizer, a codec and of stages may have an object, a class or a function instead of
            the name of an installed one (docs/howto/simulate.md).
        selection: A selection policy of your own: a function ``(waiting, num_places, round_number, rng) -> devices``,
            or a class without arguments whose objects are called like one (docs/howto/selection.md). It replaces the
            Plan's ``cohort.selection``, and has its own name.
        seed: Seed of all random choices, 0 or more.
        seeds: Seeds of several simulations instead of ``seed``, at least one. The result is that of the first seed.
            ``Result.repeats`` and ``Result.spread`` have all of them. The partition is the same for all.
        initial: A ``state_dict`` of the module from which the training starts. None: the current values of the module.
            For a Flower app, a torch module, a ``state_dict`` or a list of arrays; None: the arrays of
            ``NumPyClient.get_parameters``.
        keep: Patterns of the names of a Flower app's arrays that stay on each client, in which ``*`` is any text.
        baseline: Whether to train a centralized baseline, too: on the pooled data, with as many gradient steps in each
            Round as the clients of that Round together.
        resume: Folder for the record of the trainings. A stopped simulation resumes if it is called again with this
            folder. Its result is bit-identical with that of a simulation without a stop. A new folder begins a record.
        validation_fraction: Share of each client's examples that it holds out for its own evaluation. 0 holds nothing
            out: the clients do not evaluate.
        engine: ``graph`` trains by the exported graph in onnxruntime, bit-identical with a Run on real devices.
            ``vmap`` trains the clients of a Round together in torch, and ``vmap:cuda`` on a GPU. Their rounding
            differs. In docs/explanation/benchmarks.md ``vmap`` is faster for the logistic regression, and slower for
            the CNN. ``auto`` takes the faster one, by a measurement.
        trainer: Trains the clients instead of the graphs of the App: a class or function that returns a ``Trainer`` for
            the ``MemoryStore`` of a client, whose ``partition`` is the index of the client (docs/howto/trainer.md).
        processes: Processes that train clients in parallel; 1 trains them in this process. The Versions are the same.
        cluster: The Ray cluster that trains the clients, instead of ``processes``. The Versions are the same.
        stop_on_failure: Whether an error in the training of a client ends the simulation.
        devices: The speed, the connection and the availability of the devices.
        client_test: Test examples of each client's own, as ``Partition.split`` returns them. After the last Round, each
            client evaluates the last Version and its personal model on them (``Result.per_client``).
        fine_tune: How each client trains the last Version for itself before that (``FineTuning``). It needs
            ``client_test``. None: the personal model is the Version with the client's personal parameters.
        work: Epochs or steps of each client, and the share of stragglers (docs/howto/work.md). None: all
            clients do all steps.
        on_round: Called with each row as soon as its Round has ended. The row of a Flower app has no evaluation by the
            clients yet.
        on_version: Called after ``on_round`` with each Version: its row, parameters and module.
        keep_versions: Newest Versions whose parameters the result has, in ``Result.versions``.
        on_event: Called with each event of the event log, in the order of the virtual clock.
        on_failure: Called with each error in the training of a client, as it happens.
        quiet: Whether the simulation prints no progress on standard error.
    """

    test: "TestData | Mapping[str, TestData] | None" = None
    metrics: "Mapping[str, MetricFunction | Metric | Path | str]" = field(default_factory=dict)
    plan: Mapping[str, object] | Plan = field(default_factory=dict)
    selection: "SelectionPolicy | type[SelectionPolicy] | None" = None
    seed: int = 0
    seeds: Sequence[int] | None = None
    initial: "Mapping[str, Array] | StateDict | Sequence[Array] | Module | None" = None
    keep: Sequence[str] = ()
    baseline: bool = False
    resume: Path | str | None = None
    validation_fraction: float = 0.1
    engine: str = "graph"
    trainer: "TrainerFactory | None" = None
    processes: int = 1
    cluster: RayCluster | None = None
    stop_on_failure: bool = False
    devices: DeviceModel = field(default_factory=DeviceModel)
    client_test: Partition | None = None
    fine_tune: FineTuning | None = None
    work: ClientWork | None = None
    on_round: Callable[[RoundRow], None] = lambda row: None
    on_version: "Callable[[KeptVersion], None]" = lambda version: None
    keep_versions: int = 1
    on_event: OnEvent = lambda event: None
    on_failure: OnFailure = lambda failure: None
    quiet: bool = False

    @property
    def tests(self) -> "Mapping[str, TestData]":
        """``test`` as sets by name. One set without a name has the name ""."""
        if self.test is None or isinstance(self.test, Mapping):
            return self.test or {}
        return {"": self.test}

    @property
    def own_metrics(self) -> dict[str, Metric]:
        """``metrics`` by name.

        Raises:
            InvalidInput: A metric has no name or none of the possible forms, or its name is that of another value.
            InvalidBundle: A file is no ONNX graph.
        """
        several: object = self.metrics
        if not isinstance(several, Mapping) or not all(isinstance(name, str) for name in several):
            raise InvalidInput(
                f"simulate: metrics: got {several!r}, expected metrics by name, such as {{'errors': count_errors}}",
                code="FN-1182",
            )
        return {name: metric_of(f"simulate: metrics: {name!r}", name, value) for name, value in self.metrics.items()}

    @property
    def own_policies(self) -> dict[str, SelectionPolicy]:
        """``selection`` by its name. For a class, each access creates a new object, so all simulations begin alike.

        Raises:
            InvalidInput: ``selection`` is no function or class, or its name is none for a Plan.
        """
        selection = self.selection
        if selection is None:
            return {}
        policy = selection() if isinstance(selection, type) else selection
        if not callable(policy):
            raise InvalidInput(
                f"simulate: selection: got {type(policy).__name__}, expected a function (waiting, num_places, "
                "round_number, rng) or a class of such objects; name an installed policy by the key cohort.selection "
                "of plan",
                code="FN-1174",
            )
        name = getattr(selection, "__name__", type(selection).__name__)
        try:
            check_name("simulate: selection", name)
        except InvalidInput as exc:
            raise InvalidInput(f"{exc}; define a function with def", code="FN-1174") from exc
        if name in POLICIES:
            raise InvalidInput(
                f"simulate: selection: got a policy named {name!r}, which fanin has itself; rename yours",
                code="FN-1174",
            )
        return {name: policy}

    @property
    def passed_parts(self) -> PassedParts:
        """The factories of the objects in ``plan``. Raises InvalidInput for one without a name."""
        return {} if isinstance(self.plan, Plan) else without_objects(self.plan)[1]

    @property
    def each_seed(self) -> "tuple[SimulationSettings, ...]":
        """The settings of each simulation."""
        return tuple(replace(self, seed=seed, seeds=None, plan=self._seeded(seed)) for seed in self.seeds or ()) or (
            self,
        )

    def _seeded(self, seed: int) -> Mapping[str, object] | Plan:
        """Return the plan with this seed. Keys of a Plan need none, because the seed is a separate argument."""
        if not isinstance(self.plan, Plan):
            return self.plan
        return replace(self.plan, training=replace(self.plan.training, seed=seed))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


_FLAG: Final = _Form(accepts=lambda value: isinstance(value, bool), text="True or False")
_CALLBACK: Final = _Form(accepts=callable, text="a function of one argument")
FORMS: Final[Mapping[str, _Form]] = MappingProxyType(
    {
        "test": _Form(
            accepts=lambda value: not isinstance(value, Mapping) or len(value) > 0,
            text="Examples, or at least one test set by name",
        ),
        "plan": _Form(
            accepts=lambda value: isinstance(value, Mapping | Plan),
            text="keys of a Plan by name, such as {'training.epochs': 5}, or a Plan; "
            "fanin.clients.planfile.read_plan(path).plan is that of a file",
        ),
        "seeds": _Form(
            accepts=lambda value: not isinstance(value, Sequence) or len(value) > 0,
            text="at least one seed, or None for the one of seed",
        ),
        "keep": _Form(
            accepts=lambda value: (
                isinstance(value, Sequence)
                and not isinstance(value, str)
                and all(isinstance(each, str) for each in value)
            ),
            text="a sequence of patterns such as ['head.*']",
        ),
        "baseline": _FLAG,
        "resume": _Form(
            accepts=lambda value: value is None or isinstance(value, str | Path), text="the path of a folder, or None"
        ),
        "validation_fraction": _Form(accepts=_is_number, text="a number of at least 0 and less than 1"),
        "engine": _Form(accepts=lambda value: isinstance(value, str), text="the name of an engine"),
        "processes": _Form(accepts=is_integer, text="an integer of 1 or more"),
        "cluster": _Form(
            accepts=lambda value: value is None or isinstance(value, RayCluster), text="RayCluster(...), or None"
        ),
        "stop_on_failure": _FLAG,
        "work": _Form(
            accepts=lambda value: value is None or isinstance(value, ClientWork),
            text="ClientWork, such as ClientWork(stragglers=0.5), or None",
        ),
        "on_round": _CALLBACK,
        "on_version": _CALLBACK,
        "on_event": _CALLBACK,
        "on_failure": _CALLBACK,
        "quiet": _FLAG,
    }
)
"""The values of the settings whose types no other check tests."""


def checked(settings: object) -> SimulationSettings:
    """Return the settings, the defaults for None. Raises InvalidInput for a value of another type, or an empty one."""
    if settings is None:
        return SimulationSettings()
    if not isinstance(settings, SimulationSettings):
        raise InvalidInput(
            f"simulate: settings: got {shown(settings)}, expected SimulationSettings(...) with the options",
            code="FN-1714",
        )
    for name, form in FORMS.items():
        value = getattr(settings, name)
        if not form.accepts(value):
            raise InvalidInput(f"simulate: {name}: got {shown(value)}, expected {form.text}", code="FN-1714")
    return settings


def keys_of(plan: Mapping[str, object]) -> dict[str, Override]:
    """Return the keys of a Plan by dotted name, also those in tables. Raises InvalidPlan for a key that is in both."""
    keys: dict[str, Override] = {}
    for name, value in without_objects(plan)[0].items():
        for each in leaves_of(override_of(f"{name}={_toml(value)}", "plan")):
            if each.path in keys:
                raise InvalidPlan(
                    f"simulate: plan: got {each.path} twice, by its dotted name and in a table, expected it once; "
                    "remove one",
                    code="FN-1175",
                )
            keys[each.path] = each
    return keys


def without_objects(plan: Mapping[str, object]) -> tuple[dict[str, object], PassedParts]:
    """Return the keys of a Plan with names alone, and the factories of the objects.

    An object is used as it is, and has no options. The options of a class are its parameters. A function is called as
    that of an entry point: a rule's and an outer optimizer's with the Plan and the options.

    Raises:
        InvalidInput: An object has no name of its own.
    """
    parts: dict[tuple[str, str], Factory] = {}

    def name_of(key: str, part: object) -> object:
        if isinstance(part, str):
            return part
        named = part if isinstance(part, type) or isroutine(part) else type(part)
        name = PREFIX + named.__name__
        if not is_name(name):
            raise InvalidInput(
                f"simulate: plan: {key}: got the function {named.__name__}, expected one with a name: the record of a "
                "Run names its parts; define it with def",
                code="FN-1885",
            )
        parts[GROUPS[key], name] = _factory(part, 1 if GROUPS[key] in WITH_PLAN else 0)
        return name

    def stage_of(stage: object) -> object:
        if isinstance(stage, Mapping) and "name" in stage:
            return {**stage, "name": name_of(STAGES, stage["name"])}
        return stage if isinstance(stage, Mapping | str) else {"name": name_of(STAGES, stage)}

    def named_in(prefix: str, keys: Mapping[str, object]) -> dict[str, object]:
        return {key: _value(f"{prefix}{key}", value) for key, value in keys.items()}

    def _value(key: str, value: object) -> object:
        if key == STAGES and isinstance(value, list | tuple):
            return [stage_of(stage) for stage in value]
        if key in GROUPS and key != STAGES:
            return name_of(key, value)
        is_section = isinstance(value, Mapping) and any(each.startswith(f"{key}.") for each in GROUPS)
        return named_in(f"{key}.", value) if is_section and isinstance(value, Mapping) else value

    return named_in("", plan), parts


def _factory(part: object, num_arguments: int) -> Factory:
    """Return the factory of a part: the function itself, or one that does not pass the Plan on."""
    if isroutine(part):
        function: Callable[..., object] = part
        return function
    if isinstance(part, type):
        return RecordFactory(part, _last, num_arguments)

    def same(*_arguments: object) -> object:
        return part

    return same


def _last(*arguments: object) -> object:
    return arguments[-1]


def _toml(value: object) -> str:
    """Return a value in TOML. A text is always quoted."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            escaped = "".join(f"\\u{ord(char):04x}" if ord(char) < 32 or char in '\\"\x7f' else char for char in value)
            return f'"{escaped}"'
        case bytes():
            return _toml({BASE64: base64.b64encode(value).decode()})
        case Mapping():
            return "{" + ", ".join(f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case _:
            return str(value)
