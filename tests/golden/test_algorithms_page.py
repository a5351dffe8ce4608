"""docs/reference/algorithms.md equals the output of its generator, and has each part of fanin that a Plan can name."""

from pathlib import Path

from golden.algorithms_page import ALGORITHMS, PAGE, page, refusals_in
from support.combinations import PARTS

from fanin.edge.codecs.stages import EVALUATE_ONLY, STAGES
from fanin.protos.plans import CODEC_BITS, PLAIN_PROTOCOL
from fanin.protos.plans.privacy import MECHANISMS
from fanin.server.aggregation.exact_sums import STATISTICS_RULE
from fanin.server.aggregation.outer import OPTIMIZERS
from fanin.server.aggregation.rules import RULES
from fanin.server.protocols.known import PROTOCOLS


def test_the_page_equals_what_runs_refuse(tmp_path: Path) -> None:
    assert PAGE.read_text() == page(refusals_in(tmp_path)), "run python tests/golden/algorithms_page.py"


def test_each_part_that_a_plan_can_name_is_on_the_page_once() -> None:
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names) and set(names) == set(ALGORITHMS)
    known = {*RULES, *OPTIMIZERS, *STAGES, *CODEC_BITS, *PROTOCOLS, *MECHANISMS}
    assert known - set(names) == {"", PLAIN_PROTOCOL, STATISTICS_RULE, EVALUATE_ONLY}
