"""The section of a Plan for Flower apps: what they read, and the roles of their arrays."""

from dataclasses import dataclass, field
from typing import Annotated

from fanin.protos.plans.entries import ROLES, SETTINGS, Setting
from fanin.protos.plans.keys import Key
from fanin.protos.roles import TensorRole


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
