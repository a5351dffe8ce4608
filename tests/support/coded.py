"""The source of a module with classes, functions and values that refer to each other, for tests of digests."""

import sys
from types import ModuleType

MODULE = """
import math
import helpers
from functools import partial

SCALE = 2.0

def helper(x):
    return x * SCALE

class Base:
    def forward(self, x):
        return helper(x)

class Net(Base):
    width = 3

    def __init__(self):
        self.rates = {"a": [1, 2.5], "b": frozenset({"x", "y", "z"})}
        self.me = self

    def forward(self, x):
        inner = lambda y: math.sqrt(y) + helpers.shift(y)
        return super().forward(inner(x)) if x in {"u", "v"} else x

def loss_of(weight):
    def loss(output, y, *, margin=0.5):
        return weight * (output - y) + margin
    return loss

value = (Net(), loss_of(4.0), partial(helper, x=1), Net().forward, Net)
"""
HELPERS = "def shift(y):\n    return y + 1\n"


def value_of(text: str, helpers: str = HELPERS) -> object:
    """Return ``value`` of a module. Its functions read their globals from it."""
    module, helper = ModuleType("net"), ModuleType("helpers")
    sys.modules["helpers"] = helper
    try:
        exec(compile(helpers, "helpers.py", "exec"), vars(helper))
        exec(compile(text, "net.py", "exec"), vars(module))
    finally:
        del sys.modules["helpers"]
    return vars(module)["value"]
