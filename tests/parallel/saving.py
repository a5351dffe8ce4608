"""Helpers for a small decoder in this process: its engine, its steps and a checkpoint."""

from pathlib import Path

import numpy as np
import torch

from fanin.datacenter.checkpoints.checkpoint import Checkpoints
from fanin.datacenter.checkpoints.progress import Progress
from fanin.datacenter.families.decoders import decoder_layout
from fanin.datacenter.models.decoder import Decoder, DecoderConfig
from fanin.datacenter.parallel.batch import Batch
from fanin.datacenter.parallel.build import TrainableModel
from fanin.datacenter.parallel.engine import Engine, build_engine
from fanin.datacenter.parallel.settings import ParallelSettings, Precision, TrainingSettings


def engine_of(width: int = 16, optimizer: str = "adamw", precision: Precision = "full") -> Engine:
    """Return the engine of a small decoder in this process."""
    config = DecoderConfig(vocabulary=11, width=width, num_layers=1, num_heads=2, num_kv_heads=1, feed_forward=8)
    assert optimizer in ("adamw", "sgd")
    training = TrainingSettings(batch_size=2, learning_rate=0.1, optimizer="sgd" if optimizer == "sgd" else "adamw")
    model = TrainableModel(module=Decoder(config), layout=decoder_layout(config))
    return build_engine(model, ParallelSettings(precision=precision), training, None)


def step(engine: Engine, seed: int) -> float:
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, 11, (2, 6)))
    return float(engine.step(Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:])).loss)


def saved_engine(folder: Path, *, optimizer: str = "adamw") -> Engine:
    engine = engine_of(optimizer=optimizer)
    with Checkpoints(folder, engine) as checkpoints:
        assert checkpoints.load() is None
        step(engine, 0)
        checkpoints.save(Progress(step=1, seed=3))
    return engine
