"""tflite-runtime as an engine. The library was built for numpy 1, and its import fails with numpy 2."""

from functools import partial

import numpy as np

from fanin.edge.runtimes.engine import GraphEngine
from fanin.edge.runtimes.engines.interpreter import interpreter_engine
from fanin.protos.errors import RuntimeMissing


def tflite_engine() -> GraphEngine:
    """Return the engine over tflite-runtime.

    Raises:
        ModuleNotFoundError: tflite-runtime is not installed.
        RuntimeMissing: numpy 2 is installed.
    """
    if int(np.__version__.partition(".")[0]) >= 2:
        raise RuntimeMissing(
            f"runtime 'tflite': tflite-runtime was built for numpy 1, got numpy {np.__version__}; "
            "pip install 'fanin[tflite]', or use LiteRT: 'fanin[litert]'",
            code="FN-0408",
        )
    from tflite_runtime import __version__
    from tflite_runtime.interpreter import Interpreter, OpResolverType

    plain = partial(Interpreter, experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
    return interpreter_engine("tflite-runtime", __version__, Interpreter, plain)
