"""A runtime in the environment of its library, served over pipes: the other end of ``remote_runtime``.

    python runtime_server.py NAME

It needs only the core install and the runtime's library.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fanin.edge.bundles.bundle import Bundle, open_folder
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.runtimes.base import PaddedBatch, Runtime, StepSettings, TrainState
from fanin.protos.errors import FaninError
from support.frames import INPUT, Arrays, Row, read_frame, write_frame

Answer = tuple[Row, Arrays]


class Server:
    """The opened objects, by number."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._opened: list[Callable[..., object]] = []

    def answer(self, row: Row, arrays: Arrays) -> Answer:
        """Execute the request of a message."""
        answer: Answer = getattr(self, f"do_{row['do']}")(row, arrays)
        return answer

    def _keep(self, opened: Callable[..., object]) -> Answer:
        self._opened.append(opened)
        return {"number": len(self._opened) - 1}, {}

    def do_describe(self, row: Row, arrays: Arrays) -> Answer:
        return {"name": self._runtime.name, "graph_format": self._runtime.graph_format}, {}

    def do_open_train(self, row: Row, arrays: Arrays) -> Answer:
        return self._keep(self._runtime.open_train(bundle_at(row)))

    def do_open_evaluate(self, row: Row, arrays: Arrays) -> Answer:
        return self._keep(self._runtime.open_evaluate(bundle_at(row)))

    def do_open_predict(self, row: Row, arrays: Arrays) -> Answer:
        return self._keep(self._runtime.open_predict(bundle_at(row), arrays["parameters"], arrays.get("ranges")))

    def do_open_ranges(self, row: Row, arrays: Arrays) -> Answer:
        return self._keep(self._runtime.open_ranges(bundle_at(row), arrays["parameters"]))

    def do_open_model(self, row: Row, arrays: Arrays) -> Answer:
        model = self._runtime.open_model(arrays["graph"].tobytes(), row["what"], row["signature"])
        answer, _ = self._keep(model)
        ports = {"inputs": [asdict(port) for port in model.inputs], "outputs": [asdict(port) for port in model.outputs]}
        return answer | ports, {}

    def do_begin(self, row: Row, arrays: Arrays) -> Answer:
        state = self._opened[row["number"]].begin(arrays["parameters"])
        return {"num_steps": state.num_steps}, {"parameters": state.parameters, "optimizer": state.optimizer}

    def do_step(self, row: Row, arrays: Arrays) -> Answer:
        state = TrainState(parameters=arrays["parameters"], optimizer=arrays["optimizer"], num_steps=row["num_steps"])
        settings = StepSettings(
            learning_rate=row["learning_rate"],
            proximal_weight=row["proximal_weight"],
            anchor=arrays.get("anchor"),
            control=arrays.get("control"),
            random_key=row["random_key"],
            optimizer=row["settings"],
            group=row["group"],
        )
        state, loss = self._opened[row["number"]](state, batch_of(arrays), settings)
        answer = {"num_steps": state.num_steps, "loss": loss}
        return answer, {"parameters": state.parameters, "optimizer": state.optimizer}

    def do_evaluate(self, row: Row, arrays: Arrays) -> Answer:
        evaluate = self._opened[row["number"]]
        evaluation = evaluate(arrays["parameters"], batch_of(arrays), with_logits=row["with_logits"])
        logits = {} if evaluation.logits is None else {"logits": evaluation.logits}
        return {"loss_sum": evaluation.loss_sum}, {"predicted": evaluation.predicted, **logits}

    def do_predict(self, row: Row, arrays: Arrays) -> Answer:
        return {}, {"logits": self._opened[row["number"]](arrays)}

    def do_measure(self, row: Row, arrays: Arrays) -> Answer:
        lows, highs = self._opened[row["number"]](arrays)
        return {}, {"lows": lows, "highs": highs}

    def do_run(self, row: Row, arrays: Arrays) -> Answer:
        return {}, self._opened[row["number"]](arrays)


def bundle_at(row: Row) -> Bundle:
    """Open the Bundle in a folder, with the train graph for a batch size."""
    return open_folder(Path(row["folder"]), trusted=[row["publisher"]]).at_batch(int(row["batch_size"]))


def batch_of(arrays: Arrays) -> PaddedBatch:
    """Return the batch in a message."""
    inputs = {name.removeprefix(INPUT): array for name, array in arrays.items() if name.startswith(INPUT)}
    return PaddedBatch(inputs=inputs, y=arrays["y"], mask=arrays["mask"])


def main() -> None:
    """Answer messages until the pipe ends."""
    # The output of libraries must not reach the pipe.
    pipe, sys.stdout = sys.stdout.buffer, sys.stderr
    server = Server(open_runtime(sys.argv[1]))
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        try:
            row, arrays = server.answer(*frame)
        except (FaninError, ValueError) as exc:
            row, arrays = {"error": type(exc).__name__, "message": str(exc)}, {}
        write_frame(pipe, row, arrays)


if __name__ == "__main__":
    main()
