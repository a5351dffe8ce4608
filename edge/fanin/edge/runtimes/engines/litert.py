"""LiteRT as an engine."""

from functools import partial

from ai_edge_litert import __version__
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from fanin.edge.runtimes.engine import GraphEngine
from fanin.edge.runtimes.engines.interpreter import interpreter_engine


def litert_engine(*, plain: bool = False) -> GraphEngine:
    """Return the engine over LiteRT.

    Args:
        plain: Run each operator by its own kernel, without the XNNPACK delegate; for comparison.
    """
    own = partial(Interpreter, experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
    return interpreter_engine("ai-edge-litert", __version__, own if plain else Interpreter, own)
