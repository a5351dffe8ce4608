"""The Flower app itself. Only this module and ``servers`` import flwr.

An app receives the two messages of a ServerApp in a Round: ``evaluate`` with the arrays of the Version, if the app
evaluates, then ``train``. A Message app receives the records ``arrays`` and ``config``, an app of ``client_fn`` those
of ``NumPyClient.fit``. No other part of Flower runs: no ServerApp, no SuperNode and no connection.

The global generators of random, numpy and torch are seeded before the messages (``generators``). So an app that draws
from them returns the same arrays when a training is repeated.

Reference:
    Flower 1.41, ``flwr.app.Message`` and ``flwr.clientapp.ClientApp``.
"""

import hashlib
import importlib
import inspect
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Final, TypeVar

import flwr.client
import numpy as np
from flwr.app import DEFAULT_TTL, Array, ArrayRecord, ConfigRecord, Context, Message, Metadata, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import Code, Parameters, parameters_to_ndarrays
from flwr.common.config import flatten_dict, parse_config_args
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
from flwr.serverapp import ServerApp

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.flower.generators import seeded
from fanin.clients.flower.mods import refusal_of, warnings_of
from fanin.clients.flower.project import SERVER_APP, configuration, names_folder, resolved
from fanin.clients.flower.servers import first_arrays
from fanin.clients.flower.task import (
    NO_REPORT,
    AppFailed,
    ConfigValue,
    FlowerReply,
    FlowerReport,
    FlowerSettings,
    FlowerTask,
    Number,
)
from fanin.edge import tensors
from fanin.protos.errors import InvalidInput

T = TypeVar("T")
NUM_EXAMPLES: Final = "num-examples"
SERVER_NODE: Final = 1
"""The node id of a SuperLink."""
EMPTY: Final = "_empty"
"""The array of an ArrayRecord without arrays."""
TRAIN: Final = "train"
EVALUATE: Final = "evaluate"


class FlowerApp:
    """A Flower app that runs in this process. See FlowerRunner.

    Args:
        settings: The app and its configuration.
        app: The object of the app, if it is not to be imported: ``settings.app`` is then a name for messages alone.

    Raises:
        AppFailed: The app cannot be imported, is none, or its configuration is no valid one.
    """

    def __init__(self, settings: FlowerSettings, app: object = None) -> None:
        settings = self._settings = resolved(settings)
        self._app = _guarded(settings.app, "import", lambda: _load(settings) if app is None else _client_app(app))
        self._node_config = _guarded(settings.app, "node_config", lambda: _config(settings.node_config))
        self._run_config = _guarded(settings.app, "run_config", lambda: _run_config(settings))
        # Flower has no public list of the functions that an app registers. Apps of client_fn have only ``_call``.
        self._is_legacy = self._app._call is not None
        if refusal := refusal_of(self._functions):
            raise AppFailed(f"flower app {settings.app}: {refusal}", code="FN-0918")
        if not self._is_legacy and f"{TRAIN}.default" not in self._app._registered_funcs:
            problem = "has no @app.train(), but each Round trains; add one that returns the arrays of its message"
            raise AppFailed(f"flower app {settings.app}: {problem}", code="FN-0924")
        self._evaluates = self._is_legacy or f"{EVALUATE}.default" in self._app._registered_funcs

    @property
    def name(self) -> str:
        """See FlowerRunner."""
        return f"flwr {version('flwr')}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """See FlowerRunner."""
        return warnings_of(self._functions)

    @property
    def _functions(self) -> tuple[object, ...]:
        """The functions of the app, each wrapped by its mods."""
        return self._app._call, *self._app._registered_funcs.values()

    @property
    def has_initial(self) -> bool:
        """Whether ``initial`` may have arrays: a Message app never has."""
        return self._is_legacy

    def initial(self) -> dict[str, tensors.Array]:
        """Return the arrays of ``NumPyClient.get_parameters`` by name. Raises AppFailed if the app has none."""
        if not self._is_legacy:
            raise AppFailed(
                f"flower app {self._settings.app}: has no initial arrays, because the ServerApp of a Message app has "
                "them; name them: --initial FILE.npz, or --initial module:function that returns them",
                code="FN-0901",
            )
        content = RecordDict({"getparametersins.config": ConfigRecord()})
        reply = self._send("get_parameters", content, self._context("", b""), 0)
        record = self._one(reply.array_records, "ArrayRecord")
        arrays = {name: array.numpy() for name, array in record.items() if name != EMPTY}
        if not arrays:
            raise AppFailed(
                f"flower app {self._settings.app}: get_parameters returned no arrays, expected the initial ones; "
                "define it, or name them with --initial",
                code="FN-0901",
            )
        return arrays

    def run(self, task: FlowerTask, should_continue: ShouldContinue) -> FlowerReply:
        """Run a task, without an interruption inside it. See FlowerRunner."""
        should_continue()
        context = self._context(task.run_id, task.state)
        with seeded(task.seed):
            evaluation = self._evaluate(task, context) if self._evaluates else NO_REPORT
            arrays, training = ({}, NO_REPORT) if task.config is None else self._train(task, task.config, context)
        state = recorddict_to_proto(context.state).SerializeToString()
        return FlowerReply(arrays=arrays, training=training, evaluation=evaluation, state=state)

    def _train(
        self, task: FlowerTask, config: Mapping[str, ConfigValue], context: Context
    ) -> tuple[dict[str, tensors.Array], FlowerReport]:
        reply = self._send(TRAIN, self._content(task.arrays, config, "fitins"), context, task.round)
        if self._is_legacy:
            self._check_status(reply)
        return self._arrays(reply, task), self._report(reply, "fitres")

    def _evaluate(self, task: FlowerTask, context: Context) -> FlowerReport:
        """Return the report of the evaluation. As in Flower, an evaluation that fails does not prevent the training."""
        content = self._content(task.arrays, task.evaluate_config, "evaluateins")
        try:
            reply = self._send(EVALUATE, content, context, task.round)
            if self._is_legacy and reply.config_records["evaluateres.status"]["code"] != Code.OK.value:
                return NO_REPORT
            return self._report(reply, "evaluateres")
        except AppFailed as exc:
            return replace(NO_REPORT, problem=f"{exc}\n{exc.trace}".rstrip())

    def _check_status(self, reply: RecordDict) -> None:
        """Raise AppFailed if ``fit`` reports a failure. A ServerApp does not count such a reply either."""
        status = reply.config_records["fitres.status"]
        if (code := Code(status["code"])) is not Code.OK:
            text = " ".join(str(status["message"]).split())
            raise AppFailed(
                f"flower app {self._settings.app}: train: got the status {code.name} ({text}), expected OK; correct "
                "fit",
                code="FN-0907",
            )

    def _context(self, run_id: str, state: bytes) -> Context:
        return Context(
            run_id=int(hashlib.sha256(run_id.encode()).hexdigest()[:15], 16),
            node_id=self._settings.partition,
            node_config={"partition-id": self._settings.partition} | self._node_config,
            state=recorddict_from_proto(RecordDictProto.FromString(state)),
            run_config=dict(self._run_config),
        )

    def _content(
        self, arrays: Mapping[str, tensors.Array], config: Mapping[str, ConfigValue], legacy: str
    ) -> RecordDict:
        names = (f"{legacy}.parameters", f"{legacy}.config") if self._is_legacy else ("arrays", "config")
        record = ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})
        return RecordDict({names[0]: record, names[1]: ConfigRecord(dict(config))})

    def _send(self, kind: str, content: RecordDict, context: Context, number: int) -> RecordDict:
        """Return the content of the app's reply to a message. Raises AppFailed."""
        metadata = Metadata(
            run_id=context.run_id,
            message_id=f"{kind}.{number}",
            src_node_id=SERVER_NODE,
            dst_node_id=context.node_id,
            reply_to_message_id="",
            group_id=str(number),
            created_at=time.time(),
            ttl=DEFAULT_TTL,
            message_type=kind,
        )
        message = Message(content=content, metadata=metadata)
        reply = _guarded(self._settings.app, kind, lambda: self._app(message, context))
        if not isinstance(reply, Message) or not reply.has_content():
            problem = f"the error {reply.error.reason!r}" if isinstance(reply, Message) else type(reply).__name__
            raise AppFailed(
                f"flower app {self._settings.app}: {kind} returned {problem}, expected a Message with content",
                code="FN-0908",
            )
        return reply.content

    def _arrays(self, reply: RecordDict, task: FlowerTask) -> dict[str, tensors.Array]:
        record = self._one(reply.array_records, "ArrayRecord")
        if not self._is_legacy:
            return {name: array.numpy() for name, array in record.items()}
        # A NumPyClient returns a list: its arrays have the names of the message by position.
        arrays = [array.numpy() for name, array in record.items() if name != EMPTY]
        if len(arrays) != len(task.arrays):
            raise AppFailed(
                f"flower app {self._settings.app}: train: returned a list of {len(arrays)} arrays, expected the "
                f"{len(task.arrays)} of the message in their order; correct fit",
                code="FN-0910",
            )
        return dict(zip(task.arrays, arrays, strict=True))

    def _report(self, reply: RecordDict, legacy: str) -> FlowerReport:
        """Return ``num-examples`` and the other numbers of a reply."""
        if self._is_legacy:
            record = reply.config_records[f"{legacy}.metrics"]
            numbers = _numbers(record)
            if legacy == "evaluateres":
                numbers["loss"] = reply.metric_records[f"{legacy}.loss"]["loss"]
            num_examples = reply.metric_records[f"{legacy}.num_examples"]["num_examples"]
            others = tuple(name for name, value in record.items() if isinstance(value, str | bytes))
            return FlowerReport(num_examples=num_examples, metrics=numbers, others=others)
        numbers = _numbers(self._one(reply.metric_records, "MetricRecord"))
        if NUM_EXAMPLES not in numbers:
            raise AppFailed(
                f"flower app {self._settings.app}: got the metrics {sorted(numbers)}, expected also {NUM_EXAMPLES!r}, "
                "the weight of this device",
                code="FN-0909",
            )
        num_examples = numbers.pop(NUM_EXAMPLES)
        return FlowerReport(num_examples=num_examples, metrics=numbers, others=tuple(reply.config_records))

    def _one(self, records: Mapping[str, T], kind: str) -> T:
        if len(records) != 1:
            raise AppFailed(
                f"flower app {self._settings.app}: got the {kind}s {sorted(records)} in a reply, expected exactly one",
                code="FN-0908",
            )
        return next(iter(records.values()))


def load_arrays(where: str, folder: Path) -> dict[str, tensors.Array]:
    """Return the arrays that ``package.module:name`` or ``path/to/file.py:name`` names, in their order.

    A ServerApp has those of its first message, or of its strategy. A folder names the ``serverapp`` of its project.
    Otherwise the object is a torch module, a Keras model, a state dict, an ArrayRecord, Parameters, or a list or tuple
    of arrays. It may also be a class or a function without arguments that returns one, as in
    ``pytorchexample.task:Net``.

    Raises:
        AppFailed: It cannot be imported, its code raises an error, or it is none of these.
    """
    settings = resolved(FlowerSettings(app=where, folder=folder), SERVER_APP)

    def arrays() -> dict[str, tensors.Array]:
        candidate = _object(settings.app, settings.folder)
        if isinstance(candidate, ServerApp):
            return _arrays_of(first_arrays(candidate, flatten_dict(configuration(settings))))
        return _arrays_of(candidate)

    return _guarded(settings.app, "import", arrays)


def initial_arrays(settings: FlowerSettings, app: FlowerApp) -> dict[str, tensors.Array]:
    """Return the initial arrays of an app, as in Flower: those of the ServerApp, or of ``NumPyClient.get_parameters``.

    Args:
        settings: The settings of the app. Only the project of a folder has a ServerApp.
        app: The app.

    Raises:
        AppFailed: There are none.
    """
    if names_folder(settings):
        try:
            return load_arrays(settings.app, settings.folder)
        except AppFailed:
            if not app.has_initial:
                raise
    return app.initial()


def arrays_of(candidate: object) -> dict[str, tensors.Array]:
    """Return the arrays of an object, in their order. See ``load_arrays``. Raises InvalidInput."""
    try:
        return _arrays_of(candidate)
    except TypeError as exc:
        raise InvalidInput(f"initial: {exc}", code="FN-0902") from exc


def _arrays_of(candidate: object) -> dict[str, tensors.Array]:
    if inspect.isclass(candidate) or inspect.isfunction(candidate):
        candidate = candidate()
    for dump in ("state_dict", "get_weights"):
        if callable(method := getattr(candidate, dump, None)):
            candidate = method()
    if isinstance(candidate, Parameters):
        candidate = parameters_to_ndarrays(candidate)
    if isinstance(candidate, ArrayRecord):
        return {name: array.numpy() for name, array in candidate.items()}
    if isinstance(candidate, list | tuple):
        candidate = {str(index): value for index, value in enumerate(candidate)}
    if not isinstance(candidate, Mapping):
        raise TypeError(f"got {type(candidate).__name__}, expected a torch module, a state dict, or a list of arrays")
    return {name: _numpy(name, value) for name, value in candidate.items()}


def _numpy(name: str, value: object) -> tensors.Array:
    if isinstance(value, np.ndarray | np.generic | int | float):
        return np.asarray(value)
    if not hasattr(value, "detach"):
        hint = "; if it is the state dict, pass or save it alone" if isinstance(value, Mapping) else ""
        raise TypeError(f"array {name!r}: got {type(value).__name__}, expected a tensor or an array of numpy{hint}")
    try:
        return np.asarray(value.detach().cpu().numpy())
    except TypeError as exc:
        raise TypeError(f"array {name!r}: {exc}, expected a dtype of numpy; convert it to float32") from exc


def _load(settings: FlowerSettings) -> ClientApp:
    return _client_app(_object(settings.app, settings.folder))


def _client_app(candidate: object) -> ClientApp:
    if isinstance(candidate, ClientApp):
        return candidate
    if inspect.isclass(candidate) and issubclass(candidate, flwr.client.NumPyClient | flwr.client.Client):
        candidate = candidate()
    if isinstance(candidate, flwr.client.NumPyClient | flwr.client.Client):
        client = candidate.to_client()
        return ClientApp(client_fn=lambda context: client)
    if inspect.isfunction(candidate):
        return ClientApp(client_fn=candidate)
    raise TypeError(f"got {type(candidate).__name__}, expected a ClientApp, a NumPyClient or a client_fn(context)")


def _object(where: str, folder: Path) -> object:
    module, colon, name = where.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"got {where!r}, expected package.module:name or path/to/file.py:name")
    if not folder.is_dir():
        # Python would import the module from elsewhere, or say only that there is none.
        raise NotADirectoryError(f"got the folder {folder}, which does not exist; name the one with {module}")
    if module.endswith(".py"):
        # As for a Python script: its own folder is the one to import from.
        path = folder / module
        if not path.is_file():
            raise FileNotFoundError(f"got the file {path}, which does not exist; name one, or package.module:name")
        folder, module = path.parent, path.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    result: object = importlib.import_module(module)
    for attribute in name.split("."):
        result = getattr(result, attribute)
    return result


def _run_config(settings: FlowerSettings) -> dict[str, object]:
    """Return the configuration of the app's project, with the device's own entries."""
    return dict(flatten_dict(configuration(settings))) | _config(settings.run_config)


def _config(text: str) -> dict[str, object]:
    config: dict[str, object] = parse_config_args([text]) if text.strip() else {}
    if text.strip() and not config:
        raise ValueError(f"got {text!r}, expected key=value pairs, as in 'partition-id=0 num-partitions=2'")
    return config


def _numbers(record: MetricRecord | ConfigRecord) -> dict[str, Number]:
    """Return the numbers of a record by name. The items of a list ``NAME`` are ``NAME.0``, ``NAME.1`` and so on."""
    numbers: dict[str, Number] = {}
    for name, value in record.items():
        items = {f"{name}.{index}": item for index, item in enumerate(value)} if isinstance(value, list) else {}
        numbers |= {each: item for each, item in (items or {name: value}).items() if isinstance(item, int | float)}
    return numbers


def _guarded(app: str, what: str, call: Callable[[], T]) -> T:
    """Return the result of a call that runs code of the app. Raises AppFailed."""
    try:
        return call()
    except AppFailed:
        raise
    except (Exception, SystemExit) as exc:  # Any error: the code is the app's.
        text = " ".join(str(exc).split())
        raise AppFailed(
            f"flower app {app}: {what}: {type(exc).__name__}: {text}", traceback.format_exc(), code="FN-0905"
        ) from exc
