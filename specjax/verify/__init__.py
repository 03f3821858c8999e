"""Verification rules: which drafted tokens stand, and which token follows them."""

from specjax.verify.base import Rule, Scored, Verifier, VerifyOutput, greedy_rule
from specjax.verify.chain import block_rule, block_verify, token_rule, token_verify
from specjax.verify.draws import coupled_verify, exact_match_verify, match_rule
from specjax.verify.kseq import kseq_rule, kseq_verify
from specjax.verify.lossy import lenient, lenient_rule, typical, typical_rule
from specjax.verify.paths import best_path_rule, best_path_verify
from specjax.verify.recursive import (
    distinct_rule,
    independent_rule,
    recursive_distinct_verify,
    recursive_verify,
)
from specjax.verify.traversal import traversal_rule, traversal_verify

__all__ = [
    "Rule",
    "Scored",
    "Verifier",
    "VerifyOutput",
    "best_path_rule",
    "best_path_verify",
    "block_rule",
    "block_verify",
    "coupled_verify",
    "distinct_rule",
    "exact_match_verify",
    "greedy_rule",
    "independent_rule",
    "kseq_rule",
    "kseq_verify",
    "lenient",
    "lenient_rule",
    "match_rule",
    "recursive_distinct_verify",
    "recursive_verify",
    "token_rule",
    "token_verify",
    "traversal_rule",
    "traversal_verify",
    "typical",
    "typical_rule",
]
