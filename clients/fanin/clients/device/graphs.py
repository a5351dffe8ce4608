"""The open graphs of one Bundle, kept between the Rounds of a device.

``train`` and ``evaluate`` receive the parameters as inputs, so one open graph serves every Version of its Bundle. The
train graph of one batch size is open at a time, because a Round has one.
``infer`` is opened for each Version: its slots are filled before the runtime optimizes the graph. The graphs of a
Bundle are closed before those of another one are opened.
"""

from fanin.edge.bundles.bundle import Bundle
from fanin.edge.runtimes.base import Evaluate, LoadedModel, MeasureRanges, Predict, Preprocess, Runtime, TrainStep
from fanin.edge.runtimes.models import open_preprocess
from fanin.edge.tensors import Float32s


class BundleGraphs:
    """A ``Runtime`` that keeps the graphs of the newest Bundle open. One thread may use it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._bundle_sha256 = ""
        self._train: tuple[int, TrainStep] | None = None
        self._evaluate: Evaluate | None = None
        self._preprocess: Preprocess | None = None

    @property
    def name(self) -> str:
        return self._runtime.name

    @property
    def graph_format(self) -> str:
        return self._runtime.graph_format

    def open_train(self, bundle: Bundle) -> TrainStep:
        self._change_to(bundle)
        size = bundle.manifest.batch_size
        if self._train is None or self._train[0] != size:
            # The graph of another batch size is closed first: both at once would take the memory of two.
            self._train = None
            self._train = size, self._runtime.open_train(bundle)
        return self._train[1]

    def open_evaluate(self, bundle: Bundle) -> Evaluate:
        self._change_to(bundle)
        if self._evaluate is None:
            self._evaluate = self._runtime.open_evaluate(bundle)
        return self._evaluate

    def open_predict(self, bundle: Bundle, parameters: Float32s, ranges: Float32s | None = None) -> Predict:
        self._change_to(bundle)
        return self._runtime.open_predict(bundle, parameters, ranges)

    def open_ranges(self, bundle: Bundle, parameters: Float32s) -> MeasureRanges:
        self._change_to(bundle)
        return self._runtime.open_ranges(bundle, parameters)

    def open_model(self, graph: bytes, what: str, signature: str = "") -> LoadedModel:
        return self._runtime.open_model(graph, what, signature)

    def preprocess(self, bundle: Bundle) -> Preprocess | None:
        """Return the Bundle's ``preprocess``; None if it has none. Raises InvalidBundle."""
        self._change_to(bundle)
        if self._preprocess is None:
            self._preprocess = open_preprocess(self._runtime, bundle)
        return self._preprocess

    def _change_to(self, bundle: Bundle) -> None:
        if bundle.sha256 != self._bundle_sha256:
            self._train = self._evaluate = self._preprocess = None
            self._bundle_sha256 = bundle.sha256
