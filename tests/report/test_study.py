"""The study's table names every run, and its picture has something on it."""

import struct

from specjax.report import study

ROWS = [
    {
        "divergence": divergence,
        "writer": writer,
        "alpha_greedy": alpha,
        "alpha_sampled": alpha - 0.125,
        "tokens_per_call_greedy": 3.0,
        "tokens_per_call_sampled": 2.25,
    }
    for divergence, writer, alpha in (
        ("sequence", "truth", 0.5),
        ("forward_kl", "truth", 0.625),
        ("forward_kl", "draft", 0.75),
    )
]


def test_markdown():
    lines = study.markdown(ROWS).splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert lines[2] == "| truth | sequence | 0.500 | 0.375 | 3.00 | 2.25 |"
    assert {line.count("|") for line in lines} == {7}


def test_terminal_table():
    made = study.table(ROWS)
    assert made.row_count == 3
    assert list(made.columns[2].cells) == ["0.500", "0.625", "0.750"]


def test_picture(tmp_path):
    """A PNG of the promised size that more runs change."""
    pictures = []
    for rows in (ROWS, ROWS[:1]):
        study.plot(rows, tmp_path / "study.png")
        pictures.append((tmp_path / "study.png").read_bytes())
    assert pictures[0][:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", pictures[0][16:24]) == (1500, 675)
    assert pictures[0] != pictures[1]
