"""An auditor of differential privacy: a lower bound of epsilon from what a mechanism releases.

A *canary* is the worst Update: its norm is the sensitivity, all of it in one value of the vector. Half of many
canaries are in the sum, the others are not, and each has a value of its own. So one release is as many independent
trials as it has values. A distinguisher "the released value is at least t" has a true positive rate TPR and a false
positive rate FPR, and an (epsilon, delta)-private mechanism has TPR <= exp(epsilon) FPR + delta. Hence

    epsilon >= log((TPR - delta) / FPR)

Clopper-Pearson bounds of both rates make this a lower bound of epsilon at a confidence. The threshold is chosen on
one half of the trials, and the rates are measured on the other, so the choice costs no confidence.

Reference:
    Jagielski, Ullman, Oprea 2020, "Auditing differentially private machine learning", NeurIPS.
    Steinke, Nasr, Jagielski 2023, "Privacy auditing with one (1) training run", NeurIPS: many canaries in one run.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy import stats

from fanin.edge.tensors import Int64s

CONFIDENCE = 1 - 1e-6
NUM_THRESHOLDS = 400
Mechanism = Callable[[Int64s], Int64s]
"""From a vector of sums to what is released."""


def lower_bound(members: Int64s, others: Int64s, delta: float, confidence: float = CONFIDENCE) -> float:
    """Return a lower bound of epsilon.

    Args:
        members: Released values of the canaries that are in the sum.
        others: Those of the canaries that are not.
        delta: delta of the claim.
        confidence: Probability with which the bound is below the true epsilon.
    """
    # A large value speaks for a member; the other way round, a small one speaks for none.
    tests = [(members, others), (-others, -members)]
    candidates = []
    for side, (yes, no) in enumerate(tests):
        chosen = np.sort(yes[::2]), np.sort(no[::2])
        thresholds = np.unique(np.quantile(chosen[0], np.linspace(0.001, 0.999, NUM_THRESHOLDS)).astype(np.int64))
        candidates += [(_bound(*chosen, int(each), delta, confidence), side, int(each)) for each in thresholds]
    _, side, threshold = max(candidates)
    yes, no = tests[side]
    return _bound(np.sort(yes[1::2]), np.sort(no[1::2]), threshold, delta, confidence)


def _bound(yes: Int64s, no: Int64s, threshold: int, delta: float, confidence: float) -> float:
    """Return the bound of one threshold, for sorted values."""
    error = (1 - confidence) / 2
    num_true, num_false = (len(values) - int(np.searchsorted(values, threshold)) for values in (yes, no))
    true_rate = stats.beta.ppf(error, num_true, len(yes) - num_true + 1) if num_true else 0.0
    false_rate = stats.beta.ppf(1 - error, num_false + 1, len(no) - num_false) if num_false < len(no) else 1.0
    return max(0.0, math.log((true_rate - delta) / false_rate)) if true_rate > delta else 0.0


def audit(
    mechanism: Mechanism, sensitivity: int, num_canaries: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return a lower bound of the epsilon of one release of a mechanism. Every second canary is in the sum."""
    sums = np.zeros(num_canaries, dtype=np.int64)
    sums[::2] = sensitivity
    released = mechanism(sums)
    return lower_bound(released[::2], released[1::2], delta, confidence)
