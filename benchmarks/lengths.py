"""The peak memory of a device for a model with one length, and for the same model with four.

    python benchmarks/lengths.py --json FILE          (tflite-runtime: `make devices`)

The model is a transformer encoder of texts. A device process of each runtime trains it in a federation over TLS, as for
``edge.py``. Each device has rows of all lengths, so with four lengths it opens the train, evaluate and infer graphs of
each. The model with one length pads all rows to the longest.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from edge_children import ENVIRONMENTS, make_environments
from edge_fleet import peaks_of
from torch import Tensor, nn

from fanin.clients.data.examples import Examples
from fanin.edge.export import App, Lengths

SIZES: Final = (16, 32, 48, 64)
VOCABULARY: Final = 1000
NUM_CLASSES: Final = 4
WIDTH: Final = 64
BATCH_SIZE: Final = 16
NUM_EXAMPLES: Final = 320


class Encoder(nn.Module):
    """One encoder block over tokens, and the mean of its positions: (B, T) to (B, NUM_CLASSES). 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        states, is_token = self.block(self.table(x), src_key_padding_mask=x == 0), (x != 0).unsqueeze(-1)
        logits: Tensor = self.head((states * is_token).sum(1) / is_token.sum(1))
        return logits


def examples(seed: int) -> Examples:
    """Return rows of all lengths, padded to the longest, and their labels."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(8, SIZES[-1] + 1, (NUM_EXAMPLES, 1))
    x = rng.integers(1, VOCABULARY, (NUM_EXAMPLES, SIZES[-1]), np.int32)
    x = np.where(np.arange(SIZES[-1]) < lengths, x, np.int32(0))
    return Examples(inputs={"x": x}, y=rng.integers(0, NUM_CLASSES, NUM_EXAMPLES, np.int32))


def app_of(sizes: Sequence[int]) -> App:
    """Return the App with these lengths."""
    torch.manual_seed(0)
    return App(
        name="texts",
        module=Encoder(),
        calibration=examples(0).inputs["x"],
        batch_size=BATCH_SIZE,
        num_classes=NUM_CLASSES,
        lengths=Lengths(sizes=sizes, axes={"x": 1}),
    )


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description="Peak memory of a device with one length and with four.")
    options.add_argument("--runtimes", nargs="+", choices=list(ENVIRONMENTS), default=list(ENVIRONMENTS))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", metavar="FILE", default="")
    arguments = options.parse_args(argv)
    make_environments(arguments.runtimes)
    parts = {runtime: examples(index) for index, runtime in enumerate(arguments.runtimes, 1)}
    rows = {}
    for sizes in (SIZES[-1:], SIZES):
        with tempfile.TemporaryDirectory(prefix="fanin-lengths-") as folder:
            rows[len(sizes)] = peaks_of(app_of(sizes), parts, Path(folder), arguments.rounds)
    for num, peaks_mb in rows.items():
        sys.stdout.write(f"{num} lengths: {', '.join(f'{name} {peak:.1f} MB' for name, peak in peaks_mb.items())}\n")
    if arguments.json:
        result = {"peak_rss_mb_by_num_lengths": {str(num): peaks_mb for num, peaks_mb in rows.items()}}
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
