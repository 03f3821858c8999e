"""The curves show what a run has logged, and are the same file each time."""

import pytest

from specjax.report import curves

LINES = [
    {"step": 10, "nll": 3.0, "learning_rate": 0.1},
    {"step": 20, "nll": 2.0, "learning_rate": 0.05},
    {"step": 20, "validation_nll": 2.5},
]
ALPHAS = [{"step": 20, "alpha_greedy": 0.5, "alpha_sampled": 0.25}]


def drawn(lines, path) -> str:
    curves.plot(lines, path)
    return path.read_text(encoding="utf-8")


def test_what_was_logged_is_drawn(tmp_path):
    text = drawn(LINES, tmp_path / "a.svg")
    for label in ("nats a token", "step", "training", "held out", "learning rate"):
        assert f">{label}<" in text, label
    assert ">alpha<" not in text
    both = drawn(LINES + ALPHAS, tmp_path / "b.svg")
    for label in ("alpha", "held out, greedy", "held out, T = 1"):
        assert f">{label}<" in both, label
    assert ">training texts<" not in both
    assert drawn(LINES, tmp_path / "c.svg") == text


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_other_formats(tmp_path, suffix):
    curves.plot(LINES, tmp_path / f"a.{suffix}")
    assert (tmp_path / f"a.{suffix}").stat().st_size > 5_000
