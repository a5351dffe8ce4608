"""The Flower app itself. This is the only module that imports flwr.

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
import tomllib
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final, TypeVar

import flwr.client
import numpy as np
from flwr.app import DEFAULT_TTL, Array, ArrayRecord, ConfigRecord, Context, Message, Metadata, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import Code
from flwr.common.config import flatten_dict, parse_config_args
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto

from fanin.clients.device.conditions import ShouldContinue
from fanin.clients.flower.generators import seeded
from fanin.clients.flower.mods import warnings_of
from fanin.clients.flower.task import AppFailed, FlowerReply, FlowerSettings, FlowerTask, Number
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
        self._settings = settings
        self._app = _guarded(settings.app, "import", lambda: _load(settings) if app is None else _client_app(app))
        self._node_config = _guarded(settings.app, "node_config", lambda: _config(settings.node_config))
        self._run_config = _guarded(settings.app, "run_config", lambda: _run_config(settings))
        # Flower has no public list of the functions that an app registers. Apps of client_fn have only ``_call``.
        self._is_legacy = self._app._call is not None
        self._evaluates = self._is_legacy or f"{EVALUATE}.default" in self._app._registered_funcs

    @property
    def name(self) -> str:
        """See FlowerRunner."""
        return f"flwr {version('flwr')}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """See FlowerRunner."""
        return warnings_of((self._app._call, *self._app._registered_funcs.values()))

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
            evaluation, evaluate_metrics = self._evaluate(task, context) if self._evaluates else (0, {})
            reply = self._send(TRAIN, self._content(task, "fitins"), context, task.round)
        if self._is_legacy:
            self._check_status(reply)
        num_examples, metrics = self._metrics(reply, "fitres")
        return FlowerReply(
            arrays=self._arrays(reply, task),
            num_examples=num_examples,
            train_metrics=metrics,
            evaluation=evaluation,
            evaluate_metrics=evaluate_metrics,
            state=recorddict_to_proto(context.state).SerializeToString(),
        )

    def _evaluate(self, task: FlowerTask, context: Context) -> tuple[Number, dict[str, Number]]:
        reply = self._send(EVALUATE, self._content(task, "evaluateins"), context, task.round)
        if self._is_legacy and reply.config_records["evaluateres.status"]["code"] != Code.OK.value:
            return 0, {}
        return self._metrics(reply, "evaluateres")

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

    def _content(self, task: FlowerTask, legacy: str) -> RecordDict:
        arrays = ArrayRecord({name: Array(np.asarray(value)) for name, value in task.arrays.items()})
        config = ConfigRecord(dict(task.config))
        if self._is_legacy:
            return RecordDict({f"{legacy}.parameters": arrays, f"{legacy}.config": config})
        return RecordDict({"arrays": arrays, "config": config})

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
        names = [*task.arrays, *(f"#{index}" for index in range(len(task.arrays), len(arrays)))]
        return dict(zip(names, arrays, strict=False))

    def _metrics(self, reply: RecordDict, legacy: str) -> tuple[Number, dict[str, Number]]:
        """Return ``num-examples`` and the other numbers of a reply."""
        if self._is_legacy:
            numbers = _numbers(reply.config_records[f"{legacy}.metrics"])
            if legacy == "evaluateres":
                numbers["loss"] = reply.metric_records[f"{legacy}.loss"]["loss"]
            return reply.metric_records[f"{legacy}.num_examples"]["num_examples"], numbers
        numbers = _numbers(self._one(reply.metric_records, "MetricRecord"))
        if NUM_EXAMPLES not in numbers:
            raise AppFailed(
                f"flower app {self._settings.app}: got the metrics {sorted(numbers)}, expected also {NUM_EXAMPLES!r}, "
                "the weight of this device",
                code="FN-0909",
            )
        return numbers.pop(NUM_EXAMPLES), numbers

    def _one(self, records: Mapping[str, T], kind: str) -> T:
        if len(records) != 1:
            raise AppFailed(
                f"flower app {self._settings.app}: got the {kind}s {sorted(records)} in a reply, expected exactly one",
                code="FN-0908",
            )
        return next(iter(records.values()))


def load_arrays(where: str, folder: Path) -> dict[str, tensors.Array]:
    """Return the arrays that ``package.module:name`` or ``path/to/file.py:name`` names, in their order.

    The object is a torch module, a state dict, an ArrayRecord or a list of numpy arrays. It may also be a class or a
    function without arguments that returns one, as in ``pytorchexample.task:Net``.

    Raises:
        AppFailed: It cannot be imported, its code raises an error, or it is none of these.
    """
    return _guarded(where, "import", lambda: _arrays_of(_object(where, folder)))


def arrays_of(candidate: object) -> dict[str, tensors.Array]:
    """Return the arrays of an object, in their order. See ``load_arrays``. Raises InvalidInput."""
    try:
        return _arrays_of(candidate)
    except TypeError as exc:
        raise InvalidInput(f"initial: {exc}", code="FN-0902") from exc


def _arrays_of(candidate: object) -> dict[str, tensors.Array]:
    if inspect.isclass(candidate) or inspect.isfunction(candidate):
        candidate = candidate()
    if callable(dump := getattr(candidate, "state_dict", None)):
        candidate = dump()
    if isinstance(candidate, ArrayRecord):
        return {name: array.numpy() for name, array in candidate.items()}
    if isinstance(candidate, list):
        candidate = {str(index): value for index, value in enumerate(candidate)}
    if not isinstance(candidate, Mapping):
        raise TypeError(f"got {type(candidate).__name__}, expected a torch module, a state dict, or a list of arrays")
    return {name: _numpy(name, value) for name, value in candidate.items()}


def _numpy(name: str, value: object) -> tensors.Array:
    if isinstance(value, np.ndarray):
        return value
    try:
        return np.asarray(value.detach().cpu().numpy())  # type: ignore[attr-defined]  # a tensor of torch
    except (AttributeError, TypeError) as exc:
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
    """Return the configuration of the nearest pyproject.toml with an app, with the device's own entries."""
    for folder in (settings.folder, *settings.folder.parents):
        if (path := folder / "pyproject.toml").is_file():
            app = tomllib.loads(path.read_text()).get("tool", {}).get("flwr", {}).get("app")
            if app is not None:
                return dict(flatten_dict(app.get("config", {}))) | _config(settings.run_config)
    return _config(settings.run_config)


def _config(text: str) -> dict[str, object]:
    config: dict[str, object] = parse_config_args([text]) if text.strip() else {}
    if text.strip() and not config:
        raise ValueError(f"got {text!r}, expected key=value pairs, as in 'partition-id=0 num-partitions=2'")
    return config


def _numbers(record: MetricRecord | ConfigRecord) -> dict[str, Number]:
    return {name: value for name, value in record.items() if isinstance(value, int | float)}


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
