"""The loss of one output for all samples. A module whose loss is not lower has learnt nothing from its inputs.

So the loss alone shows whether a module is trained: its values may have any scale, such as logits for targets 0 and 1.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from fanin.edge.export.app.losses import Loss
from fanin.edge.export.graph.examples import loss_targets
from fanin.edge.export.module.draws import refused

MAX_STEPS: Final = 50


def constant_loss(loss: Loss, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> float | None:
    """Return the sum of the loss for the best constant output that a minimization finds; None if it has none.

    Args:
        loss: The loss of an App.
        outputs: The outputs of its module by batch, each (n, ...). The minimization begins at their mean.
        targets: Their targets.
    """
    values, num = [math.inf], sum(map(len, outputs))
    constant = torch.cat([*outputs]).mean(0, keepdim=True).requires_grad_()
    optimizer = torch.optim.LBFGS([constant], max_iter=MAX_STEPS, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        optimizer.zero_grad()
        parts = [loss(constant.expand(len(y), *constant.shape[1:]), loss_targets(y)).sum() for y in targets]
        total = torch.stack(parts).sum()
        values.append(float(total.detach()))
        mean = total / num
        mean.backward()  # type: ignore[no-untyped-call]  # torch's
        return mean

    # Any error: the loss is the user's code, and a step may leave its domain, such as that of shares.
    with suppress(Exception), refused():
        optimizer.step(step)  # type: ignore[no-untyped-call]  # torch's
    best = min(value for value in values if not math.isnan(value))
    return best if math.isfinite(best) else None
