"""The optimization of a translated model: the passes of onnxscript's ``optimize_ir``, with an index of its rules.

onnxscript tries each of its 46 rules at each node, although a rule begins with one operator. That takes a fifth of the
export of a transformer. Here a rule is tried only at the nodes of its operator. The result is the same.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final, cast

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer._constant_folding import (
    DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT,
    DEFAULT_CONSTANT_FOLD_OUTPUT_SIZE_LIMIT,
    FoldConstantsPass,
)
from onnxscript.rewriter import _DEFAULT_REWRITE_RULES, RewritePass
from onnxscript.rewriter._pattern_ir import StringConstantPattern
from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet

MAX_REWRITES: Final = 2
"""Times that the model is rewritten. onnxscript's default: a rule may enable another."""


@dataclass(frozen=True, slots=True)
class IndexedRule:
    """A rule of onnxscript that is tried at the nodes of one operator alone."""

    rule: RewriteRule
    operator: str

    def __getattr__(self, name: str) -> object:
        return getattr(self.rule, name)

    def try_rewrite(
        self, model: ir.Model, graph: ir.Graph | ir.Function, node: ir.Node, *, verbose: int | None, tracer: None
    ) -> object | None:
        """Return the replacement of the matching nodes from this one on; None without a match."""
        if node.op_type != self.operator:
            return None
        return self.rule.try_rewrite(model, graph, node, verbose=verbose, tracer=tracer)


def optimize(model: ir.Model) -> None:
    """Fold constants, simplify operators, and remove unused and repeated elements. The model is changed."""
    rewriting = ir.passes.PassManager(
        [
            FoldConstantsPass(
                shape_inference=True,
                input_size_limit=DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT,
                output_size_limit=DEFAULT_CONSTANT_FOLD_OUTPUT_SIZE_LIMIT,
            ),
            RewritePass(_rules()),
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
            common.RemoveUnusedOpsetsPass(),
        ],
        steps=MAX_REWRITES,
        early_stop=True,
    )
    ir.passes.Sequential(
        common.InlinePass(),
        rewriting,
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)


@cache
def _rules() -> RewriteRuleSet:
    return RewriteRuleSet([_indexed(rule) for rule in _DEFAULT_REWRITE_RULES])


def _indexed(rule: RewriteRule) -> RewriteRule:
    """Return a rule that skips the nodes of other operators; the rule itself if it begins with several."""
    operators = {node.op for node in rule._target_pattern.output_nodes}
    names = {operator.value() for operator in operators if isinstance(operator, StringConstantPattern)}
    if len(names) != 1 or not all(isinstance(operator, StringConstantPattern) for operator in operators):
        return rule
    return cast("RewriteRule", IndexedRule(rule, names.pop()))
