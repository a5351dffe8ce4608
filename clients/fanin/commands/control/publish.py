"""``fanin publish``: parameters trained in the datacenter become the next Version of a Run.

Checks before anything is sent:

1. The source is whole: the files of a checkpoint have their digests.
2. The key signed the Run's Bundle, and the Run's newest Version verifies.
3. The source has the names and shapes of the Bundle, and finite values.
4. With ``--data``, int8 keeps up with float.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fanin.clients.data.npz import read_npz
from fanin.commands.console.show import run_row
from fanin.commands.console.terminal import (
    DEFAULT_KEY,
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    RoundsOption,
    ServerOption,
    StateOption,
    TokenOption,
    check_max_drop,
    connect,
    prints_text,
    run_command,
    write_json,
)
from fanin.commands.console.usage import wrong_usage
from fanin.commands.display.bars import byte_bar
from fanin.edge.bundles.keys import load_or_create_key
from fanin.edge.runtimes.available import open_format
from fanin.protos.errors import InvalidInput


def main(argv: Sequence[str]) -> int:
    """Run ``fanin publish``."""
    return run_command(publish, argv)


def publish(
    source: Annotated[
        Path,
        typer.Argument(
            help="Checkpoints or one checkpoint, the folder of fanin train --state or fanin fetch, or a file of "
            "parameters: parameters.bin, .npz, .safetensors."
        ),
    ],
    run_id: Annotated[str, typer.Option("--run", metavar="RUN", help="The run; fanin runs lists them.")],
    key: Annotated[Path, typer.Option("--key", help="The publisher's key, which signed the bundle.")] = DEFAULT_KEY,
    rounds: RoundsOption = 0,
    data: Annotated[
        Path | None, typer.Option("--data", help="Examples, an .npz file, on which int8 must keep up with float.")
    ] = None,
    max_int8_drop: Annotated[
        float | None, typer.Option("--max-int8-drop", help="Allowed loss of int8 on --data; see fanin export.")
    ] = None,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Publish trained parameters as the next version of a run, which must be paused or have ended."""
    with wrong_usage():
        check_max_drop(max_int8_drop)
        if max_int8_drop is not None and data is None:
            raise InvalidInput("--max-int8-drop: expected --data FILE.npz with it", code="FN-1004")
    if not key.exists():
        raise InvalidInput(f"--key {key}: no such file, expected the key that signed the run's bundle", code="FN-1016")
    # Importing torch takes seconds.
    from fanin.datacenter.checkpoints.trained import read_trained
    from fanin.datacenter.jobs.publish import check_int8, measure_version, parent_version, publish_vector, vector_for

    publisher, values = load_or_create_key(key), read_trained(source)
    examples = None if data is None else read_npz(data)
    with connect(state, server, ca, token_file, byte_bar) as operator:
        parent = parent_version(operator, run_id, publisher)
        bundle = parent.bundle
        vector = vector_for(bundle.manifest, values)
        if examples is not None:
            if not bundle.manifest.slots:
                raise InvalidInput(
                    f"--data: run {run_id} has a bundle without int8 graphs; leave it out", code="FN-0846"
                )
            runtime = open_format(bundle.manifest.signatures["infer"].graphs.keys())
            check_int8(measure_version(runtime, bundle, bundle.completed(vector), examples), max_int8_drop)
        info = publish_vector(operator, parent, vector, publisher, rounds)
    if json:
        write_json(json, {**run_row(info), "source": str(values.source)})
    if prints_text(json):
        sys.stdout.write(
            f"version {info.version} of run {info.run_id} published from {values.source}; the run is "
            f"{info.state.value}\n"
        )
