"""How many drafts a rule keeps, by exact enumeration: each rule in its second writing.

Probabilities may be floats or fractions. Everything is a recursion over prefixes: what
is accepted below a prefix depends on nothing but the prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from specjax.proof.tables import TableModel
from specjax.verify import (
    Verifier,
    best_path_rule,
    block_rule,
    distinct_rule,
    independent_rule,
    kseq_rule,
    match_rule,
    token_rule,
    traversal_rule,
)

Number = Any  # float or Fraction
Row = Sequence[Number]
Tokens = tuple[int, ...]
Laws = Callable[[Tokens], Row]
# What may stand below a node: number of the child, its token, and how probably.
Choices = Iterable[tuple[int, int, Number]]
Tree = tuple[int, ...]


def laws_of(model: TableModel) -> Laws:
    """The laws of a model of one table, after a prefix.

    Args:
        model: its longest prefix is as deep as any that is asked for.
    """
    probs = np.exp(np.asarray(model.logits, np.float64))
    rows = (probs / probs.sum(-1, keepdims=True)).tolist()

    def law(prefix: Tokens) -> Row:
        index = 0
        for token in prefix:
            index = index * model.vocab_size + token + 1
        return rows[index]

    return law


def accepted_law(
    verifier: Verifier,
    p: Laws,
    q: Laws,
    tree: Tree,
    siblings: str = "distinct",
    ends: Callable[[Tokens], bool] = lambda prefix: False,
) -> list[Number] | None:
    """Probability that 0, 1, ... drafts of one block stand; None for unknown rules.

    Args:
        verifier: decides which.
        p: the target's laws.
        q: the draft's; of "chosen" children, what they are ranked by.
        tree: parents of its nodes, the root's -1. A chain is one.
        siblings: how children are drawn, one of `types.SIBLINGS`.
        ends: whether a drafted path is not continued, by its own tokens; for chains.
    """
    if verifier.rule in (block_rule, best_path_rule):
        return _block(p, q, tree, ends)
    if verifier.rule is traversal_rule:
        return _traversal(p, q, tree)[0]
    if verifier.rule not in _WALKS:
        return None
    coupled = verifier.noise == "position" and siblings != "chosen"
    choices = _coupled if coupled else _WALKS[verifier.rule]

    def below(node: int, prefix: Tokens) -> list[Number]:
        children = [] if ends(prefix) else _children(tree, node)
        law = [0] * (_depth(tree) + 1)
        stays: Number = 1
        for rank, token, chance in choices(
            p(prefix), q(prefix), len(children), siblings
        ):
            stays -= chance
            for more, own in enumerate(below(children[rank], (*prefix, token))[:-1]):
                law[more + 1] += chance * own
        law[0] += stays
        return law

    return below(0, ())


def mean(law: Row) -> Number:
    """The expected number."""
    return sum(number * own for number, own in enumerate(law))


def _children(tree: Tree, node: int) -> list[int]:
    return [child for child, parent in enumerate(tree) if parent == node]


def _depth(tree: Tree, node: int = 0) -> int:
    return max((1 + _depth(tree, child) for child in _children(tree, node)), default=0)


def _normalised(weights: Row) -> Row:
    total = sum(weights)
    return [own / total for own in weights] if total else weights


def _without(law: Row, token: int) -> Row:
    return _normalised([0 * own if i == token else own for i, own in enumerate(law)])


def _rest(p: Row, q: Row) -> Row:
    return [max(a - b, 0 * a) for a, b in zip(p, q, strict=True)]


def _after(mass: Number, passing: Number) -> Number:
    """Chance that a prefix stands, given that no longer one did."""
    return mass / (mass + 1 - passing) if mass + 1 - passing else 1


def _drawn(q: Row, count: int, siblings: str) -> Iterator[tuple[Tokens, Number]]:
    """All that the children of one node can be, and how probably."""
    if siblings in ("distinct", "chosen"):
        # Where tokens run out, those of probability 0 fill up, in order of id.
        spare = tuple(token for token, own in enumerate(q) if not own)
        if siblings == "chosen":
            ranked = sorted(range(len(q)), key=lambda token: (-q[token], token))
            yield tuple(ranked[:count]), 1
            return

        def more(law: Row, count: int) -> Iterator[tuple[Tokens, Number]]:
            if count == 0 or not any(law):
                yield spare[:count], 1
                return
            for token, own in enumerate(law):
                if own:
                    for tokens, chance in more(_without(law, token), count - 1):
                        yield (token, *tokens), own * chance

        yield from more(q, count)
        return
    for tokens in itertools.product(range(len(q)), repeat=count):
        chance: Number = 1
        for token in tokens:
            chance *= q[token]
        if chance:
            yield tokens, chance


def _token(p: Row, q: Row, count: int, siblings: str) -> Choices:
    """One draft: min(p, q)."""
    if count:
        yield from ((0, token, min(p[token], own)) for token, own in enumerate(q))


def _match(p: Row, q: Row, count: int, siblings: str) -> Choices:
    """A child stands where a draw from p equals it, and no earlier child."""
    for tokens, chance in _drawn(q, count, siblings):
        for rank, token in enumerate(tokens):
            if token not in tokens[:rank]:
                yield rank, token, chance * p[token]


def _recursive(p: Row, q: Row, count: int, siblings: str) -> Choices:
    """Each child against what earlier ones have left, by the sequence of draws."""

    def tried(left: Row, law: Row, rank: int) -> Choices:
        if rank == count:
            return
        rest = _normalised(_rest(left, law))
        for token, drawn in enumerate(law):
            if not drawn:
                continue
            stands = min(left[token] / drawn, 1)
            yield rank, token, drawn * stands
            if stands < 1:
                fewer = _without(law, token) if siblings == "distinct" else law
                for place, other, chance in tried(rest, fewer, rank + 1):
                    yield place, other, drawn * (1 - stands) * chance

    return tried(p, q, 0)


def _kseq(p: Row, q: Row, count: int, siblings: str) -> Choices:
    """The first of k that passes min(1, p / (rho q)), for the least rho that fits."""
    if not count:
        return
    low, high = 1.0, float(count)
    for _ in range(60):
        rho = (low + high) / 2
        beta = sum(min(b, a / rho) for a, b in zip(p, q, strict=True))
        fits = 1 - (1 - beta) ** count <= rho * beta
        low, high = (low, rho) if fits else (rho, high)
    each = [min(b, a / high) for a, b in zip(p, q, strict=True)]
    for rank in range(count):
        before = (1 - sum(each)) ** rank
        yield from ((rank, token, before * own) for token, own in enumerate(each))


def _coupled(p: Row, q: Row, count: int, siblings: str) -> Choices:
    """Children are the draft's first `count` in the race that the target's token wins.

    Token i rings at E_i / p_i for the target and at E_i / q_i for the draft, with E
    exponential. Where i wins at E_i = t for the target, j has E_j > t p_j / p_i; it is
    before i for the draft where E_j < t q_j / q_i. Both are exponentials in t, so their
    product over j integrates term by term.
    """
    spare = [token for token, own in enumerate(q) if not own]
    for i, own in enumerate(p):
        if not own:
            continue
        if i in spare:  # after all that the draft can draw
            rank = len(q) - len(spare) + spare.index(i)
            if rank < count:
                yield rank, i, own
            continue
        others = [
            (p[j] / own, q[j] / q[i], max(p[j] / own, q[j] / q[i]))
            for j in range(len(p))
            if j != i
        ]
        for before in itertools.product((False, True), repeat=len(others)):
            ranges = [
                # exp(-t low) - exp(-t high), or exp(-t most), as signs and rates.
                [(1, low), (-1, most)] if ahead else [(1, most)]
                for ahead, (low, _, most) in zip(before, others, strict=True)
            ]
            chance: Number = 0
            for terms in itertools.product(*ranges):
                sign, rate = 1, 0 * own + 1
                for factor, more in terms:
                    sign, rate = sign * factor, rate + more
                chance += sign / rate
            if sum(before) < count:
                yield sum(before), i, chance


_WALKS = {
    token_rule: _token,
    match_rule: _match,
    independent_rule: _recursive,
    distinct_rule: _recursive,
    kseq_rule: _kseq,
}


def _block(
    p: Laws, q: Laws, tree: Tree, ends: Callable[[Tokens], bool]
) -> list[Number]:
    """The last prefix that passes, of the path that is best level by level.

    A block of one path is the plain rule.
    """

    def level(front: tuple[int, ...], prefix: Tokens) -> tuple[list[int], Row]:
        """Who draws the next token of the path, and the law of the best of them."""
        drawing = [child for node in front for child in _children(tree, node)]
        if ends(prefix) or not drawing:
            return [], [0] * len(q(prefix))
        law = [0] * len(q(prefix))
        for tokens, chance in _drawn(q(prefix), len(drawing), "independent"):
            law[_best(tokens, p(prefix), q(prefix))] += chance
        return drawing, law

    def below(front: tuple[int, ...], prefix: Tokens, joint: Number) -> list[Number]:
        """Chances that the last to pass is this prefix or shorter, or 1, 2, ... on."""
        law = [0] * (_depth(tree) + 1)
        drawing, best = level(front, prefix)
        if not drawing:
            law[0] = 1
            return law
        paths: dict[tuple[int, tuple[int, ...]], Number] = {}
        for tokens, chance in _drawn(q(prefix), len(drawing), "independent"):
            token = _best(tokens, p(prefix), q(prefix))
            same = tuple(
                n for n, own in zip(drawing, tokens, strict=True) if own == token
            )
            paths[token, same] = paths.get((token, same), 0) + chance
        for (token, same), chance in paths.items():
            longer = (*prefix, token)
            up = min(joint * p(prefix)[token] / best[token], 1)
            drawn, after = level(same, longer)
            scaled = [up * own for own in p(longer)] if drawn else []
            passing = _after(sum(_rest(scaled, after)), up) if drawn else up
            own = below(same, longer, up)
            law[0] += chance * own[0] * (1 - passing)
            law[1] += chance * own[0] * passing
            for more, deeper in enumerate(own[1:-1], start=2):
                law[more] += chance * deeper
        return law

    return below((0,), (), 1)


def _best(tokens: Tokens, p: Row, q: Row) -> int:
    """Of drawn tokens the one with most of p for its q, the lower id of equals."""
    return min(tokens, key=lambda token: (-(p[token] / q[token]), token))


def _traversal(p: Laws, q: Laws, tree: Tree) -> tuple[list[Number], Number]:
    """Leaves before their parents: who stands, and the chance that nobody does."""

    def visit(
        children: list[int], prefix: Tokens, passing: Number, left: Row, law: Row
    ) -> tuple[list[Number], Number]:
        """`children` are still to be tried, and their node after them."""
        found = [0] * (_depth(tree) + 1)
        if not children or not any(law):
            found[0] = passing
            return found, 1 - passing
        rest = _rest([passing * own for own in left], law)
        after = _after(sum(rest), passing)
        rest = _normalised(rest) if sum(rest) else left
        failed: Number = 0
        for token, drawn in enumerate(law):
            if not drawn:
                continue
            longer = (*prefix, token)
            up = min(passing * left[token] / drawn, 1)
            own, none = visit(
                _children(tree, children[0]), longer, up, p(longer), q(longer)
            )
            then, neither = visit(
                children[1:], prefix, after, rest, _without(law, token)
            )
            for more, chance in enumerate(own[:-1]):
                found[more + 1] += drawn * chance
            for more, chance in enumerate(then):
                found[more] += drawn * none * chance
            failed += drawn * none * neither
        return found, failed

    return visit(_children(tree, 0), (), 1, p(()), q(()))
