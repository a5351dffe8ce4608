"""Verification of a Run: recompute every Version from its parent and its closed set of Updates.

For each published Round, the parent's parameters, the committed payloads, their headers and the grid are read from the
coordinator's folder. The fold and the outer step are repeated. The digests of parameters, auxiliary tensors and outer
state must be the recorded ones. No coordinator needs to run. A database of an older form is refused and never changed.

Modules, in reading order:

    history.py     the record of a Run, opened
    rounds.py      one Version recomputed
    runs.py        all Versions
"""

from fanin.server.aggregation.verify.history import Archive
from fanin.server.aggregation.verify.runs import Verdict, verify_run

__all__ = ["Archive", "Verdict", "verify_run"]
