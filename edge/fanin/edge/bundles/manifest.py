"""The manifest: the facts of a Bundle, as values that agree with each other.

A Manifest is created by an export and signed, or parsed from signed bytes (``manifest_json``). Its constructor checks
that every artifact, parameter and slot that it names exists. So code that holds a Manifest looks names up without
further checks.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from fanin.edge.batch_sizes import check_other_sizes, with_batch
from fanin.edge.bundles.derived import NOTHING, Derived
from fanin.edge.bundles.slots import Slot, check_slots
from fanin.edge.floors.floor import NO_FLOOR, PrivacyFloor
from fanin.edge.lengths import Lengths
from fanin.edge.queries.query import StatisticsQuery
from fanin.edge.ranges import Activation
from fanin.edge.signatures import BATCH_PORTS, DEVICE_SIGNATURES, TRAIN, Signature, check_batch_ports, check_same_ports
from fanin.edge.tensors import Float32s, TensorTable
from fanin.protos.chunks import Artifact
from fanin.protos.errors import InvalidBundle, InvalidInput
from fanin.protos.names import check_label
from fanin.protos.roles import RoleKind

NO_GRAPHS: Final = "arrays"
"""The graph format that a device reports if code trains on it: it takes Bundles without graphs."""
STATISTICS: Final = "statistics"
"""The graph format that a device reports if it answers queries about its examples."""
UNBOUNDED: Final = 2.0**127
"""Bound of a setting without another one. The graphs compute in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSetting:
    """A setting of the optimizer that a Plan may change: an input of the ``train`` graph.

    Attributes:
        default: Its value where the Plan has none, from 0.0 to below ``below``.
        below: Bound of its values, in the range of float32.
    """

    default: float
    below: float = UNBOUNDED

    def __post_init__(self) -> None:
        if not 0.0 < self.below <= UNBOUNDED or not self.allows(self.default):
            raise ValueError(
                f"got the default {self.default} below {self.below}, expected at least 0.0, below a bound of at most "
                f"{UNBOUNDED:g}"
            )

    def allows(self, value: float) -> bool:
        """Return whether the setting may have a value."""
        return 0.0 <= value < self.below


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParameters:
    """The personal parameters of a Bundle: a device trains them and never sends them.

    Attributes:
        table: Their names and shapes; at least one.
        initial: Name of the artifact with the values that every device starts from.
    """

    table: TensorTable
    initial: str

    def __post_init__(self) -> None:
        if not self.table.specs:
            raise ValueError("local: got no parameters, expected at least one; leave the key out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The facts of a Bundle.

    Attributes:
        name: Name of the model, for people.
        batch_size: Batch size of the ``train`` and ``evaluate`` graphs.
        num_classes: Number of labels or tokens that the model predicts; 0 for a regression model.
        table: Names and shapes of the parameters that devices and the coordinator exchange.
        signatures: The graphs by Signature: at least ``DEVICE_SIGNATURES``. Empty in a Bundle without graphs
            (``fanin.edge.bundles.arrays``). Signatures without files are those of an App that only torch can run.
        slots: The slots of the ``infer`` graph by graph format.
        activations: The activations of the ``infer`` graphs of all formats, whose grids a Version may change.
        artifacts: All files of the Bundle by name.
        initial: Name of the artifact with the parameters of Version 0.
        derived: Tensors that are computed from parameters, which slots may use.
        num_tokens: Number of tokens that the model accepts, by the name of the input. An input without an entry has no
            tokens, or accepts any token number.
        optimizer: The settings of the optimizer that a Plan may change, by name.
        lengths: The lengths of the model's sequences; None if all samples have one shape. ``DEVICE_SIGNATURES`` are
            the graphs of the longest. The graphs of a shorter one have names such as ``train@16``, and their slots the
            key ``onnx@16``.
        local: The personal parameters, which are inputs of the graphs like those of ``table``; None for none.
        other_batch_sizes: Batch sizes that a Plan may choose instead of ``batch_size``. Their train graphs have names
            such as ``train@b8``, and with lengths also ``train@16@b8``.
        privacy_floor: The least privacy with which devices train the model. Nobody can remove it: it is signed.
        query: The statistics that devices report instead of a training; None for a model. Its tensors are the table.

    Raises:
        InvalidBundle: The facts contradict each other.
    """

    name: str
    batch_size: int
    num_classes: int
    table: TensorTable
    signatures: Mapping[str, Signature]
    slots: Mapping[str, tuple[Slot, ...]]
    artifacts: Mapping[str, Artifact]
    initial: str
    derived: Derived = NOTHING
    num_tokens: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    optimizer: Mapping[str, OptimizerSetting] = field(default_factory=lambda: MappingProxyType({}))
    lengths: Lengths | None = None
    local: LocalParameters | None = None
    other_batch_sizes: tuple[int, ...] = ()
    activations: tuple[Activation, ...] = ()
    privacy_floor: PrivacyFloor = NO_FLOOR
    query: StatisticsQuery | None = None

    def __post_init__(self) -> None:
        self._check_labels()
        if self.batch_size < 1 or self.num_classes < 0:
            raise InvalidBundle(
                f"manifest: got batch_size {self.batch_size} and num_classes {self.num_classes}, expected at least 1 "
                "and 0",
                code="FN-0312",
            )
        if self.signatures and (lacking := sorted(set(DEVICE_SIGNATURES) - set(self.signatures))):
            raise InvalidBundle(
                f"manifest: got signatures {sorted(self.signatures)}, expected also {lacking}", code="FN-0313"
            )
        for name, signature in self.signatures.items():
            for artifact in signature.graphs.values():
                if artifact not in self.artifacts:
                    raise InvalidBundle(
                        f"manifest: signature {name!r} names artifact {artifact!r}, which is not listed", code="FN-0322"
                    )
        inputs = {port.name for port in self.signatures["infer"].inputs} if self.signatures else set()
        if not self.num_tokens.keys() <= inputs or any(num < 1 for num in self.num_tokens.values()):
            raise InvalidBundle(
                f"manifest: got num_tokens {dict(self.num_tokens)}, expected numbers of at least 1 for inputs of "
                f"{sorted(inputs)}",
                code="FN-0312",
            )
        if self.initial not in self.artifacts:
            raise InvalidBundle(
                f"manifest: initial parameters {self.initial!r} are not among the artifacts", code="FN-0322"
            )
        self._check_local()
        self._check_query()
        shapes = {spec.name: spec.shape for spec in self.model_table.specs}
        self.derived.shapes(shapes)
        formats = self.signatures["infer"].graphs if self.signatures else {}
        for graph_format in formats:
            if shapes and not self.slots.get(graph_format):
                raise InvalidBundle(
                    f"manifest: got no slots in {graph_format!r}, expected at least one; "
                    "without slots no Version changes the int8 model",
                    code="FN-0318",
                )
        self._check_activations(formats)
        for key, slots in self.slots.items():
            graph_format, _, size = key.partition("@")
            if graph_format not in formats or (size and int_of(size) not in self._shorter):
                raise InvalidBundle(
                    f"manifest: slots in {key!r}, expected only in formats of the infer graph", code="FN-0318"
                )
            names = [row.name for row in self.activations if row.graph_format == graph_format]
            check_slots(slots, shapes, self.derived, names)
        self._check_names()
        self._check_lengths()
        self._check_batch_sizes()

    def _check_labels(self) -> None:
        """Raise InvalidBundle if a name could leave a folder, or control a terminal that shows it."""
        local = () if self.local is None else self.local.table.specs
        ports = {port.name for each in self.signatures.values() for port in (*each.inputs, *each.outputs)}
        names: dict[str, Iterable[str]] = {
            "name": (self.name,),
            "artifact": self.artifacts,
            "parameter": (spec.name for spec in (*self.table.specs, *local)),
            "signature": self.signatures,
            "port": ports,
            "graph format": {name for each in self.signatures.values() for name in each.graphs},
            "slot": (slot.initializer for slots in self.slots.values() for slot in slots),
            "activation": (row.name for row in self.activations),
            "derived": (*self.derived.constants, *self.derived.folded),
            "optimizer": self.optimizer,
        }
        for kind, labels in names.items():
            for label in labels:
                try:
                    check_label(f"manifest: {kind}", label)
                except InvalidInput as exc:
                    raise InvalidBundle(str(exc), code=exc.code) from exc

    def _check_activations(self, formats: Collection[str]) -> None:
        """Raise InvalidBundle unless activations have names of their own, and slots in a format of the infer graph."""
        names = [row.name for row in self.activations]
        strange = {row.graph_format for row in self.activations} - ({*formats} & {*self.slots})
        if len(set(names)) < len(names) or strange:
            raise InvalidBundle(
                f"manifest: got {len(names)} activations with {len(set(names))} names in the formats "
                f"{sorted({row.graph_format for row in self.activations})}, expected different names in formats of the "
                f"infer graph, {sorted(formats)}",
                code="FN-0319",
            )

    def _check_query(self) -> None:
        """Raise InvalidBundle unless sums are those of a query, and a query has no graphs."""
        has_sums = any(role.role is RoleKind.SUM for role in self.table.roles.values())
        if self.query is None and not has_sums:
            return
        table = TensorTable(()) if self.query is None else self.query.table
        if table != self.table or table.roles != self.table.roles or self.signatures:
            raise InvalidBundle(
                "manifest: query: got tensors other than the sums of the query, or graphs, expected these sums alone; "
                "write the bundle with fanin stats",
                code="FN-1863",
            )

    def _check_local(self) -> None:
        """Raise InvalidBundle unless personal parameters have values, and other names than those that travel."""
        if self.local is None:
            return
        if not self.signatures or not self.table.specs:
            raise InvalidBundle(
                "manifest: local: got no graphs, or only personal parameters, expected graphs and "
                "at least one parameter that travels",
                code="FN-0315",
            )
        if self.local.initial not in self.artifacts or self.local.initial == self.initial:
            raise InvalidBundle(
                f"manifest: local: got the initial values {self.local.initial!r}, expected an artifact of their own",
                code="FN-0322",
            )
        if both := {spec.name for spec in self.table.specs} & {spec.name for spec in self.local.table.specs}:
            raise InvalidBundle(
                f"manifest: local: got {sorted(both)} also among the parameters that travel", code="FN-0315"
            )

    @property
    def model_table(self) -> TensorTable:
        """Names and shapes of all parameters that the graphs take: those that travel and the personal ones."""
        return self.table if self.local is None else self.table.joined(self.local.table)

    def join(self, parameters: Float32s, local: Float32s) -> Float32s:
        """Return all parameters of the graphs (num_model_values,), laid out by ``model_table``.

        Args:
            parameters: The parameters that travel (num_values,).
            local: The personal parameters (num_local_values,); empty if there are none.

        Raises:
            ValueError: A vector has another length.
        """
        if self.local is None:
            if local.size:
                raise ValueError(f"personal parameters: got {local.size} values, expected none")
            return parameters
        views = self.table.views(parameters) | self.local.table.views(local)
        return self.model_table.flatten(views)

    def split(self, values: Float32s) -> tuple[Float32s, Float32s]:
        """Return the parameters that travel (num_values,) and the personal ones (num_local_values,): undo ``join``."""
        if self.local is None:
            return values, values[:0]
        views = self.model_table.views(values)
        shared, personal = (
            table.flatten({spec.name: views[spec.name] for spec in table.specs})
            for table in (self.table, self.local.table)
        )
        return shared, personal

    @property
    def _shorter(self) -> tuple[int, ...]:
        return () if self.lengths is None else self.lengths.shorter

    @property
    def _train_names(self) -> tuple[str, ...]:
        """Names of the train graphs of all lengths, for the Bundle's own batch size."""
        return (TRAIN, *(f"{TRAIN}@{size}" for size in self._shorter))

    def _check_names(self) -> None:
        """Raise InvalidBundle unless exactly the lengths and the batch sizes have Signatures of their own."""
        expected = {f"{kind}@{size}" for kind in DEVICE_SIGNATURES for size in self._shorter}
        expected |= {with_batch(name, size) for name in self._train_names for size in self.other_batch_sizes}
        names = {name for name in self.signatures if "@" in name}
        if names != expected:
            raise InvalidBundle(
                f"manifest: got the signatures {sorted(names)} of lengths and batch sizes, expected "
                f"{sorted(expected)}; export the App again",
                code="FN-0316",
            )

    def _check_batch_sizes(self) -> None:
        """Raise InvalidBundle unless the train graphs of all batch sizes have the same ports except for the batch."""
        try:
            check_other_sizes(self.batch_size, self.other_batch_sizes)
        except InvalidInput as exc:
            raise InvalidBundle(f"manifest: {exc}", code=exc.code) from exc
        for size in self.other_batch_sizes:
            for name in self._train_names:
                batched = BATCH_PORTS | {port.name for port in self.signatures["infer"].inputs}
                other = with_batch(name, size)
                check_batch_ports(self.signatures[name], self.signatures[other], batched, (other, size))

    def _check_lengths(self) -> None:
        """Raise InvalidBundle unless every length has the same Signatures, with the same ports except for the axis."""
        if self.lengths is None:
            return
        for size in self.lengths.sizes:
            view = self.at(size)
            for kind in DEVICE_SIGNATURES:
                check_same_ports(self.signatures[kind], view.signatures[kind], self.lengths, kind, size)

    def at(self, size: int) -> "Manifest":
        """Return the facts of the graphs for one length, in the form of a Bundle with this single length.

        Args:
            size: One of ``lengths.sizes``.
        """
        assert self.lengths is not None and size in self.lengths.sizes, "the caller asks for a known length"
        suffix = "" if size == self.lengths.longest else f"@{size}"
        formats = self.signatures["infer"].graphs
        return replace(
            self,
            lengths=None,
            other_batch_sizes=(),
            signatures=MappingProxyType({kind: self.signatures[kind + suffix] for kind in DEVICE_SIGNATURES}),
            slots=MappingProxyType({name: self.slots.get(name + suffix, ()) for name in formats}),
        )

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """All batch sizes that a Plan may choose, ascending."""
        return tuple(sorted((self.batch_size, *self.other_batch_sizes)))

    def at_batch(self, size: int) -> "Manifest":
        """Return the facts for training by batches of one size, in the form of a Bundle with this size alone.

        ``evaluate`` and ``infer`` stay those of the Bundle: evaluate with the Bundle itself, in batches of its size.

        Args:
            size: One of ``batch_sizes``, or 0 for the Bundle's own.

        Raises:
            InvalidInput: The Bundle has no graph for this size.
        """
        if size in (0, self.batch_size):
            return self
        if size not in self.other_batch_sizes:
            raise InvalidInput(
                f"batch_size: got {size}, but the bundle's train graphs are for "
                f"{', '.join(map(str, self.batch_sizes))}; choose one of these, or export the App with "
                f"App(other_batch_sizes=({size},))",
                code="FN-0263",
            )
        signatures = {name: each for name, each in self.signatures.items() if not name.startswith(TRAIN)}
        signatures |= {name: self.signatures[with_batch(name, size)] for name in self._train_names}
        return replace(self, batch_size=size, other_batch_sizes=(), signatures=MappingProxyType(signatures))

    @property
    def graph_formats(self) -> tuple[str, ...]:
        """The formats in which every graph exists; without graphs ``NO_GRAPHS``, and ``STATISTICS`` for a query."""
        if self.query is not None:
            return (STATISTICS,)
        formats = [set(signature.graphs) for signature in self.signatures.values()]
        return tuple(sorted(set.intersection(*formats))) if any(formats) else (NO_GRAPHS,)

    def files(self, graph_format: str, signatures: Collection[str] | None = None) -> frozenset[str]:
        """Return the artifacts that a device of this format needs in addition to the parameters of a Version.

        Args:
            graph_format: The format of its runtime.
            signatures: The Signatures that it runs, known or not; None for all.
        """
        if graph_format == NO_GRAPHS and not self.signatures:
            return frozenset(self.artifacts) - {self.initial}
        names = self.signatures.keys() & (self.signatures.keys() if signatures is None else signatures)
        graphs = (self.signatures[name].graphs.get(graph_format, "") for name in names)
        return (frozenset(graphs) | {"" if self.local is None else self.local.initial}) - {""}


def int_of(text: str) -> int:
    """Return the number that a text is in its canonical form; -1 for another text."""
    return int(text) if text.isascii() and text.isdecimal() and str(int(text)) == text else -1
