"""The tables of the database.

Times are seconds since the Unix epoch. Columns ``*_proto`` hold serialized ``fanin.v1`` messages. A change here needs a
migration in ``migrations/versions``. A test keeps the two equal.

At the end: messages in columns. SQLite verifies the structure of its file, not the content of a value. A damaged value
therefore shows only when it is parsed, and it must not end in the error of another library.
"""

from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message
from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from fanin.protos.errors import Corrupted, FaninError
from fanin.protos.wire import from_proto

METADATA: Final = MetaData()
NUMBER: Final = BigInteger().with_variant(Integer, "sqlite")
"""A number of 64 bits. SQLite's INTEGER has 64 bits already, and only an INTEGER can be the key of its rows."""

devices = Table(
    "devices",
    METADATA,
    Column("device_id", String, primary_key=True),
    Column("public_key", String, nullable=False),
    Column("enrolled_at", Float, nullable=False),
    Column("label", String),
    # Lines of name=value, sorted, with a line feed before the first and after the last.
    Column("tags", Text),
    # The name of the token.
    Column("enrolled_by", String),
    # Null: it is not banned.
    Column("banned_at", Float),
    Column("ban_reason", Text),
    Column("banned_by", String),
    # Its last check-in: the time, and a DeviceInfo with what it reported. Written in batches.
    Column("last_seen", Float),
    Column("reported_proto", LargeBinary),
    # Why a check-in or an Update was refused last, and when.
    Column("last_rejection", Text),
    Column("rejected_at", Float),
)

tokens = Table(
    "tokens",
    METADATA,
    Column("name", String, primary_key=True),
    # Only the digest of the token, so that a reader of the database cannot enroll or command.
    Column("sha256", String, nullable=False, unique=True),
    # admin, operator, viewer, device
    Column("role", String, nullable=False),
    Column("created_at", Float, nullable=False),
    # A principal such as "admin anna"; empty for the first tokens.
    Column("created_by", String, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    # Of enrollment tokens: the devices that it may enroll, and those that it did; their label and tags as above.
    Column("max_uses", NUMBER),
    Column("num_uses", NUMBER, nullable=False),
    Column("label", String, nullable=False),
    Column("tags", Text, nullable=False),
)

# Append-only. Each digest covers the row and the digest before (protos.messages.audit).
audit = Table(
    "audit",
    METADATA,
    Column("sequence", NUMBER, primary_key=True, autoincrement=False),
    Column("time_us", BigInteger, nullable=False),
    Column("principal", String, nullable=False),
    Column("call", String, nullable=False),
    Column("subject", Text, nullable=False),
    Column("outcome", String, nullable=False),
    Column("digest", String, nullable=False),
)

bundles = Table(
    "bundles",
    METADATA,
    Column("bundle_sha256", String, primary_key=True),
    Column("bundle_proto", LargeBinary, nullable=False),
)

run_keys = Table(
    "run_keys",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    Column("private_key", LargeBinary, nullable=False),
    # A key that no Run uses is removed after a while.
    Column("prepared_at", Float, nullable=False),
)

runs = Table(
    "runs",
    METADATA,
    Column("run_id", String, primary_key=True),
    # The command that started the Run, to distinguish a repeated command from another one with the same id.
    Column("start_proto", LargeBinary, nullable=False),
    Column("state", String, nullable=False),
    Column("reason", Text, nullable=False),
    # Published Rounds after which the Run finishes.
    Column("max_rounds", NUMBER, nullable=False),
    Column("started_at", Float, nullable=False),
    # The principal that started it, in the same form.
    Column("started_by", String),
    # The delegation of the newest epoch. Null: that of the command that started the Run.
    Column("delegation_proto", LargeBinary),
    # When a backup was restored whose Runs wait for their publisher. Null: never, or the publisher reclaimed the Run.
    Column("restored_at", Float),
    # The population of a Run with a mechanism of privacy.
    Column("population", String),
    # Since when this folder may lack rows of the ledger for this Run: a backup was restored, the folder is a copy, or
    # the publisher reclaimed the Run. Null: never, or they are charged.
    Column("uncharged_at", Float),
)

# The populations whose privacy budgets Runs share. No row is ever removed, and only the last two columns change.
populations = Table(
    "populations",
    METADATA,
    Column("population", String, primary_key=True),
    # The largest epsilon of the ledger, and its delta.
    Column("epsilon", Float, nullable=False),
    Column("delta", Float, nullable=False),
    Column("size", NUMBER, nullable=False),
    # The Run that began it.
    Column("run_id", String, nullable=False),
    Column("begun_at", Float, nullable=False),
    # The claim of its total: zero-out or add-or-remove.
    Column("relation", String, nullable=False),
    # The number of rows of its ledger, written with each of them.
    Column("num_rows", NUMBER, nullable=False),
    # The database file that was opened last. Null: none since the population began, or since a restore.
    Column("place", String),
)

# The releases of a population, of all its Runs. Append-only.
privacy_ledger = Table(
    "privacy_ledger",
    METADATA,
    Column("population", String, primary_key=True),
    Column("number", NUMBER, primary_key=True, autoincrement=False),
    Column("run_id", String, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("lineage", NUMBER, nullable=False),
    # The Round whose close was charged, 0 for an interval that a restored coordinator lost.
    Column("round", NUMBER, nullable=False),
    # JSON (privacy.ledger), and how often it was released.
    Column("release", Text, nullable=False),
    Column("count", NUMBER, nullable=False),
    # Of the ledger up to this row.
    Column("epsilon", Float, nullable=False),
    Column("delta", Float, nullable=False),
    Column("committed_at", Float, nullable=False),
    Index("ledger_of_round", "run_id", "round"),
)

# The seed of the noise of each Round that was charged. It is erased, not the row: a Round never gets a second seed.
noise_seeds = Table(
    "noise_seeds",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("round", NUMBER, primary_key=True),
    Column("seed", LargeBinary),
    Column("erased_at", Float),
)

versions = Table(
    "versions",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("number", NUMBER, primary_key=True),
    Column("version_proto", LargeBinary, nullable=False),
    # The Round that published it, 0 for a Version from outside.
    Column("round", NUMBER, nullable=False),
    Column("published_at", Float),
    # The Version whose parameters a rollback, a promotion or a reclaim published again. Null for any other Version.
    Column("adopted_run_id", String),
    Column("adopted_number", NUMBER),
)

# What retention removed: the parameters of a Version, or the Updates of a Round.
removals = Table(
    "removals",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("number", NUMBER, primary_key=True),
    # It is recorded before the first file is removed. Null: files may be left.
    Column("removed_at", Float, nullable=False),
    Column("finished_at", Float),
)

version_evaluations = Table(
    "version_evaluations",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("number", NUMBER, primary_key=True),
    Column("data_sha256", String, nullable=False),
    # Larger is better. Null: the Version could not be evaluated, and a later try replaces the row.
    Column("score", Float),
    Column("evaluation_proto", LargeBinary, nullable=False),
    ForeignKeyConstraint(["run_id", "number"], ["versions.run_id", "versions.number"], name="evaluations_version"),
)

leases = Table(
    "leases",
    METADATA,
    Column("run_id", String, primary_key=True),
    # The number of the newest lease. Writes of drivers with a lower one are refused.
    Column("epoch", NUMBER, nullable=False),
    # The process that took it, for operators.
    Column("holder", String, nullable=False),
    Column("taken_at", Float, nullable=False),
)

rounds = Table(
    "rounds",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("round", NUMBER, primary_key=True),
    Column("base_version", NUMBER, nullable=False),
    # JSON list of exponents.
    Column("grid", Text, nullable=False),
    # open, closed, published, failed
    Column("state", String, nullable=False),
    Column("opened_at", Float, nullable=False),
    Column("deadline_at", Float),
    # Seconds to the deadline when the Run was paused.
    Column("left_s", Float),
    # The number of rosters that were frozen before the phase of the deadline. Null: 0.
    Column("deadline_rosters", NUMBER),
    # JSON list of device ids in the order of acceptance, once the Round is closed.
    Column("accepted", Text),
    # JSON list of exponents for the next Round, once this Round is published.
    Column("next_grid", Text),
    # JSON object of the ranges that the coordinator measured for the Version, if the Plan asks for them.
    Column("measured", Text),
    # After retention removed the rows of its Updates: their number, and the digest of their set. Then accepted is null.
    Column("num_accepted", NUMBER),
    Column("accepted_sha256", String),
)

outer_states = Table(
    "outer_states",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("round", NUMBER, primary_key=True),
    # The name of a tensor of the optimizer's state after the Round.
    Column("name", String, primary_key=True),
    Column("artifact_proto", LargeBinary, nullable=False),
    ForeignKeyConstraint(["run_id", "round"], ["rounds.run_id", "rounds.round"], name="outer_states_round"),
)

updates = Table(
    "updates",
    METADATA,
    Column("sequence", NUMBER, primary_key=True, autoincrement=True),
    Column("run_id", String, nullable=False),
    # The Round that folds it, and the Round of its Assignment, which may be earlier.
    Column("round", NUMBER, nullable=False),
    Column("made_for", NUMBER, nullable=False),
    Column("device_id", String, nullable=False),
    Column("header_proto", LargeBinary, nullable=False),
    UniqueConstraint("run_id", "round", "device_id", name="one_update_a_device_and_round"),
    UniqueConstraint("run_id", "made_for", "device_id", name="one_update_an_assignment"),
    ForeignKeyConstraint(["run_id", "round"], ["rounds.run_id", "rounds.round"], name="updates_round"),
    # For the last Round of a device.
    Index("updates_of_device", "run_id", "device_id", "round"),
    # For the number of Updates of a device.
    Index("updates_by_device", "device_id"),
)

# The folded Updates of a device whose rows retention removed: their number, and the last one.
contributions = Table(
    "contributions",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("device_id", String, primary_key=True),
    Column("num_updates", NUMBER, nullable=False),
    Column("last_round", NUMBER, nullable=False),
    Column("last_made_for", NUMBER, nullable=False),
    # For the number of Updates of a device.
    Index("contributions_by_device", "device_id"),
)

# The devices' messages of the phases of a Round, in the order of their commits.
messages = Table(
    "messages",
    METADATA,
    Column("sequence", NUMBER, primary_key=True, autoincrement=True),
    Column("run_id", String, nullable=False),
    Column("round", NUMBER, nullable=False),
    Column("phase", String, nullable=False),
    Column("device_id", String, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    UniqueConstraint("run_id", "round", "phase", "device_id", name="one_message_a_device_and_phase"),
    ForeignKeyConstraint(["run_id", "round"], ["rounds.run_id", "rounds.round"], name="messages_round"),
)

# The devices whose messages of a phase count.
rosters = Table(
    "rosters",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("round", NUMBER, primary_key=True),
    # From 0, in the order of the phases.
    Column("number", NUMBER, primary_key=True),
    Column("phase", String, nullable=False),
    # JSON list of device ids in the order of their messages.
    Column("devices", Text, nullable=False),
    UniqueConstraint("run_id", "round", "phase", name="one_roster_a_phase"),
    ForeignKeyConstraint(["run_id", "round"], ["rounds.run_id", "rounds.round"], name="rosters_round"),
)

commands = Table(
    "commands",
    METADATA,
    Column("command_id", String, primary_key=True),
    # The digest of the command, to distinguish a repeated command from another one with the same id.
    Column("command_sha256", String, nullable=False),
    Column("carried_out_at", Float, nullable=False),
    # The principal that sent it, such as "operator 3fa9c01b2d4e". Null for one from within the process.
    Column("principal", String),
)

events = Table(
    "events",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("time", Float, nullable=False),
    Column("event_proto", LargeBinary, nullable=False),
)

# Each warning of a Run once. The event has its text.
warnings = Table(
    "warnings",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("code", String, primary_key=True),
    Column("subject", String, primary_key=True),
    Column("sequence", NUMBER, nullable=False),
)

ValueT = TypeVar("ValueT")


def decode(what: str, kind: type[ValueT], message: type[Message], data: bytes) -> ValueT:
    """Return the value of a recorded message.

    Args:
        what: The record, for the error.
        kind: The class of the value.
        message: The class of the message.
        data: The bytes of the column.

    Raises:
        Corrupted: The bytes are not such a message, or its value is invalid.
    """
    try:
        return from_proto(kind, message.FromString(data))
    except (DecodeError, FaninError) as exc:
        raise Corrupted(
            f"fanin.db: {what}: the record is damaged ({exc}); restore a backup of the folder", code="FN-0508"
        ) from exc
