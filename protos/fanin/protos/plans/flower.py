"""The section of a Plan for Flower apps: what they read, the roles of their arrays, and the strategy of a Round."""

from dataclasses import dataclass, field
from typing import Annotated, Final

from fanin.protos.plans.entries import OPTIONS, ROLES, SETTINGS, Option, Setting
from fanin.protos.plans.keys import Key, keys_of
from fanin.protos.roles import TensorRole

SERVER_ROUND: Final = "server-round"
"""The entry of the Round's number that Flower's strategies set."""
ROUND_NAMES: Final = ("server_round", "current_round", "round")
"""Names of the same number that apps read. In Flower, a function of the ServerApp sets them."""
STRATEGY_FORM: Final = "the form package.module:name or path/to/file.py:name"


def is_strategy(text: str) -> bool:
    """Return whether a text has the form of a strategy; an empty one names none."""
    module, colon, name = text.partition(":")
    return not text or bool(module and colon and name and text.isprintable() and ":" not in name)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerPlan:
    """Settings that Flower apps read, in a Run whose Bundle has no graphs."""

    config: Annotated[
        dict[str, Setting],
        Key(
            text='Entries of the ConfigRecord `config` in each message. Bytes are written as `{ base64 = "AAEC" }`, '
            "and all items of a list have one type. `lr` is `training.learning_rate` unless it is here. "
            "`server-round` is the number of the Round, and so are `server_round`, `current_round` and `round` unless "
            "they are here.",
            entries=SETTINGS,
            see="../howto/flower.md",
        ),
    ] = field(default_factory=dict)
    roles: Annotated[
        dict[str, TensorRole],
        Key(
            text="Roles of arrays by patterns of their names, in which `*` is any text: `parameter`, `statistic` or "
            "`counter`, with a range if you write it as a table. An array that no pattern matches has the role of its "
            "name: `*running_mean` and `*running_var` are statistics, `*num_batches_tracked` is a counter, and all "
            "others are parameters.",
            entries=ROLES,
            see="../howto/flower.md#roles-of-arrays",
        ),
    ] = field(default_factory=dict)
    strategy: Annotated[
        str,
        Key(
            text="A `Strategy` of Flower's message API that makes the next parameters of the Updates, instead of "
            "`aggregation.rule` and `aggregation.outer_optimizer`. The coordinator runs those of "
            "`flwr.serverapp.strategy`, and those of `fanin serve --strategy`. Empty: none.",
            form=STRATEGY_FORM,
            is_valid=is_strategy,
            see="../howto/flower.md#a-strategy",
        ),
    ] = ""
    strategy_options: Annotated[
        dict[str, Option],
        Key(
            text="Arguments of the strategy's constructor, such as `beta = 0.2` of `FedTrimmedAvg`.",
            entries=OPTIONS,
            see="../howto/flower.md#a-strategy",
        ),
    ] = field(default_factory=dict)
    strategy_is_pure: Annotated[
        bool,
        Key(
            text="Whether the result of the strategy depends on its options, its state and its arguments alone. "
            "`fanin verify` then runs it again. Otherwise a Round is recorded as not reproducible.",
            see="../howto/flower.md#verify",
        ),
    ] = False
    strategy_streams: Annotated[
        bool,
        Key(
            text="Whether `aggregate_train` reads each reply once, in order. It then receives an iterator, and one "
            "Update is in memory at a time. Otherwise it receives a list of all.",
            see="../howto/flower.md#memory",
        ),
    ] = False


def strategy_keys(flower: FlowerPlan) -> list[str]:
    """Return the names of the keys about a strategy that have another value than their default."""
    names = (key for key in keys_of(FlowerPlan) if key.name.startswith("strategy"))
    return [key.name for key in names if getattr(flower, key.name) != key.default]


def memory_notes(flower: FlowerPlan, buffer: int) -> tuple[str, ...]:
    """Return a note on the memory of the strategy, if there is one."""
    if not flower.strategy:
        return ()
    memory = "one update at a time" if flower.strategy_streams else f"all updates of a Round at once, up to {buffer}"
    return (f"flower.strategy: {flower.strategy} reads {memory}, in a process of its own on the coordinator's machine",)
