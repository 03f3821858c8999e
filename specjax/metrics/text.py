"""How good a text is that a model wrote: against references, by the usual scores.

Needs the extra `data`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence

from specjax import errors

Score = Callable[[Sequence[str], Sequence[str]], float]


def text_scores(
    outputs: Sequence[str],
    references: Sequence[str],
    names: Sequence[str] | None = None,
) -> dict[str, float]:
    """Scores of what a model wrote.

    Args:
        outputs: what a model wrote.
        references: what it should have written, as many.
        names: members of `SCORES`; None: all of them.

    Returns:
        By name: ``exact_match``, the share of equal texts; ``character_error_rate``:
        edits (Levenshtein) by characters of the references; ``bleu`` (Papineni et al.
        2002) and ``chrf`` (Popovic 2015) of the whole corpus with sacrebleu's standard
        settings, in 0..100; ``rouge1``, ``rouge2`` and ``rouge_l`` (Lin 2004): mean F1
        of single words, of pairs and of the longest common subsequence, in 0..100, of
        lower case without stemming. ROUGE's words are of the letters a to z and digits
        alone: it means little for other languages than English.

    Raises:
        errors.InputError: no texts, not as many of both, an unknown name, or a package
            that is not installed.
    """
    if not outputs or len(outputs) != len(references):
        raise errors.InputError(
            f"{len(outputs)} texts and {len(references)} references cannot be scored: "
            "as many of both, and at least one"
        )
    names = tuple(SCORES) if names is None else names
    check_scores(names)
    return {name: SCORES[name](outputs, references) for name in names}


def check_scores(names: Sequence[str], setting: str = "names") -> None:
    """Refuses what `text_scores` would, before there are texts.

    Args:
        names: of scores.
        setting: how the caller names them, for the message.

    Raises:
        errors.InputError: an unknown name, or a package that is not installed.
    """
    for name in names:
        if name not in SCORES:
            raise errors.InputError(
                f"{setting} has {name!r}: known scores are {', '.join(SCORES)}"
            )
    try:
        for name in names:
            if name in _PACKAGES:
                importlib.import_module(_PACKAGES[name])
    except ImportError as error:
        raise errors.InputError(
            f"{error.name} is not installed: pip install 'specjax[data]' brings what "
            "texts are scored with"
        ) from error


def _exact_match(outputs: Sequence[str], references: Sequence[str]) -> float:
    equal = [a == b for a, b in zip(outputs, references, strict=True)]
    return sum(equal) / len(equal)


def _character_error_rate(outputs: Sequence[str], references: Sequence[str]) -> float:
    from rapidfuzz import distance

    edits = map(distance.Levenshtein.distance, outputs, references)
    return sum(edits) / max(sum(map(len, references)), 1)


def _bleu(outputs: Sequence[str], references: Sequence[str]) -> float:
    import sacrebleu

    return sacrebleu.corpus_bleu(list(outputs), [list(references)]).score


def _chrf(outputs: Sequence[str], references: Sequence[str]) -> float:
    import sacrebleu

    return sacrebleu.corpus_chrf(list(outputs), [list(references)]).score


def _rouge(kind: str) -> Score:
    def score(outputs: Sequence[str], references: Sequence[str]) -> float:
        from rouge_score import rouge_scorer

        scorer = rouge_scorer.RougeScorer([kind])
        found = map(scorer.score, references, outputs)
        return 100 * sum(own[kind].fmeasure for own in found) / len(outputs)

    return score


SCORES: Mapping[str, Score] = {
    "exact_match": _exact_match,
    "character_error_rate": _character_error_rate,
    "bleu": _bleu,
    "chrf": _chrf,
    "rouge1": _rouge("rouge1"),
    "rouge2": _rouge("rouge2"),
    "rouge_l": _rouge("rougeL"),
}
# Of which less is better.
ERRORS = ("character_error_rate",)
# Imported where they are used; exact match needs none.
_PACKAGES = {
    "character_error_rate": "rapidfuzz",
    "bleu": "sacrebleu",
    "chrf": "sacrebleu",
    "rouge1": "rouge_score",
    "rouge2": "rouge_score",
    "rouge_l": "rouge_score",
}
