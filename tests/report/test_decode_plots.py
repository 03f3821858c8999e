"""Drawings of decodes: the numbers that are drawn, and what says what they are."""

import numpy as np
import pytest

from specjax import metrics, theory
from specjax.report import decode_plots, plots

pytest.importorskip("matplotlib")


def lines(axis):
    """The drawn points by label."""
    return {line.get_label(): np.asarray(line.get_xydata()) for line in axis.lines}


def bars(axis):
    """Points and the ends of their bars of errors, by label."""
    return {
        own.get_label(): (
            np.asarray(own[0].get_xydata()),
            np.array([segment[:, 1] for segment in own[2][0].get_segments()]),
        )
        for own in axis.containers
        if hasattr(own, "has_yerr")
    }


def texts(figure):
    """Whatever is written in a drawing."""
    return plots.svg(figure, "t")


def test_speedup_by_gamma():
    rows = [
        {"gamma": 3, "speedup": 1.5, "low": 1.4, "high": 1.7, "predicted": 1.6},
        {"gamma": 1, "speedup": 1.2, "low": 1.1, "high": 1.3, "predicted": 1.25},
    ]
    figure = decode_plots.speedup_by_gamma(rows, alpha=0.7, c=0.1)
    (axis,) = figure.axes
    drawn = lines(axis)
    formula = drawn["the paper's formula: alpha 0.70, c 0.10, v 1"]
    gammas = np.arange(1, 5)
    assert formula[:, 0] == pytest.approx(gammas)
    assert formula[:, 1] == pytest.approx(theory.walltime_factor(0.7, gammas, 0.1))
    counted = drawn["from the counts and costs of these decodes"]
    assert counted.tolist() == [[1, 1.25], [3, 1.6]]
    points, ends = bars(axis)["measured, with quartiles"]
    assert points.tolist() == [[1, 1.2], [3, 1.5]]
    assert ends == pytest.approx(np.array([[1.1, 1.3], [1.4, 1.7]]))
    assert axis.get_xlabel() == "gamma: tokens drafted per target call"
    assert axis.get_ylabel() == "speedup over the target alone"
    assert axis.get_ylim()[0] == 0


def test_speedups_alone_are_drawn_too():
    rows = [{"gamma": 2, "speedup": 0.8}]
    (axis,) = decode_plots.speedup_by_gamma(rows, alpha=0.5, c=0.2).axes
    points, ends = bars(axis)["measured"]
    assert points.tolist() == [[2, 0.8]] and ends.tolist() == [[0.8, 0.8]]
    assert "from the counts and costs of these decodes" not in lines(axis)


def test_acceptance_by_position():
    survivals = {"greedy": [0.8, 0.4, 0.0, 0.0], "T = 1": [0.5, 0.25]}
    figure = decode_plots.acceptance_by_position(survivals, {"greedy": 0.75})
    whole, then = figure.axes
    assert lines(whole)["greedy"].tolist() == [[1, 0.8], [2, 0.4], [3, 0], [4, 0]]
    assert lines(whole)["T = 1"][:, 1].tolist() == [0.5, 0.25]
    # No block has come to depth 4: nothing is known of it.
    assert lines(then)["greedy"][:3, 1] == pytest.approx([0.8, 0.5, 0.0])
    assert np.isnan(lines(then)["greedy"][3, 1])
    assert lines(then)["T = 1"][:, 1] == pytest.approx([0.5, 0.5])
    assert lines(then)["alpha 0.75, greedy"][:, 1] == pytest.approx([0.75] * 4)
    (expected,) = [
        line.get_xydata()[:, 1] for line in whole.lines if line.get_linestyle() == "--"
    ]
    assert expected == pytest.approx(theory.iid_survival(0.75, 4))
    assert {axis.get_xlabel() for axis in figure.axes} == {"position in the block"}


def test_block_lengths():
    figure = decode_plots.block_lengths([5, 3, 0, 2], alpha=0.6)
    (axis,) = figure.axes
    heights = [patch.get_height() for patch in axis.patches]
    centres = [patch.get_x() + patch.get_width() / 2 for patch in axis.patches]
    assert heights == pytest.approx([0.5, 0.3, 0.0, 0.2])
    assert centres == pytest.approx([1, 2, 3, 4])
    drawn = lines(axis)
    expected = drawn["alike and independent, alpha 0.60"][:, 1]
    assert expected == pytest.approx([0.4, 0.6 * 0.4, 0.36 * 0.4, 0.216])
    assert expected.sum() == pytest.approx(1)
    assert drawn["mean 1.90 tokens per call"][:, 0] == pytest.approx([1.9, 1.9])
    labels = [own.get_text() for own in axis.get_xticklabels()]
    assert labels == ["1\n50%", "2\n30%", "3\n0%", "4\n20%"]
    assert "10 calls" in texts(figure)


def test_block_lengths_of_no_call():
    (axis,) = decode_plots.block_lengths([0, 0]).axes
    assert [patch.get_height() for patch in axis.patches] == [0, 0]


def test_alpha_by_entropy():
    entropy = np.array([3.0, 0.5, 1.0, 2.0])
    beta = np.array([0.2, 1.0, 0.8, 0.4])
    figure = decode_plots.alpha_by_entropy(entropy, beta, bins=2)
    (axis,) = figure.axes
    drawn = lines(axis)
    assert drawn["4 prefixes"].tolist() == [[0.5, 1], [1, 0.8], [2, 0.4], [3, 0.2]]
    assert drawn["alpha, the mean of all: 0.60"][:, 1] == pytest.approx([0.6, 0.6])
    points, ends = bars(axis)["means of as many prefixes each, with standard errors"]
    assert points == pytest.approx(np.array([[0.75, 0.9], [2.5, 0.3]]))
    assert ends == pytest.approx(np.array([[0.8, 1.0], [0.2, 0.4]]))
    assert "nats" in axis.get_xlabel()


@pytest.mark.parametrize("count", [0, 1])
def test_alpha_of_hardly_any_prefix(count):
    (axis,) = decode_plots.alpha_by_entropy([1.0] * count, [0.5] * count).axes
    assert len(lines(axis)[f"{count} prefixes"]) == count


def timing(seconds):
    return metrics.Timing((seconds,) * 3)


COSTS = metrics.Costs(
    gamma=2,
    step=timing(0.004),
    verify=timing(0.006),
    draft=timing(0.002),
    encode=timing(0.003),
    draft_encode=timing(0.001),
)


def test_lanes():
    lane = decode_plots.speculative_lane("gamma 2", COSTS, 2)
    kinds = [kind for kind, _, _ in lane["parts"]]
    assert kinds == ["encode", "draft encode", *["draft", "draft", "verify"] * 2]
    starts = [start for _, start, _ in lane["parts"]]
    ends = [start + length for _, start, length in lane["parts"]]
    assert starts[1:] == pytest.approx(ends[:-1]) and starts[0] == 0
    assert ends[-1] == pytest.approx(0.003 + 0.001 + 2 * (0.002 + 0.006))
    alone = decode_plots.plain_lane("target alone", COSTS, 3)
    assert [kind for kind, _, _ in alone["parts"]] == ["encode", *["step"] * 3]
    assert alone["parts"][-1][1:] == pytest.approx([0.011, 0.004])


def test_the_timeline_is_to_scale_in_milliseconds():
    lanes = [
        decode_plots.speculative_lane("gamma 2", COSTS, 1),
        decode_plots.plain_lane("target alone", COSTS, 3),
    ]
    figure = decode_plots.timeline(lanes)
    (axis,) = figure.axes
    drawn = []
    for own in axis.collections:
        (path,) = own.get_paths()
        (left, low), (right, high) = path.vertices.min(0), path.vertices.max(0)
        drawn.append((round((low + high) / 2), left, right - left))
    wanted = [
        (at, 1e3 * start, 1e3 * length)
        for at, lane in enumerate(lanes)
        for _, start, length in lane["parts"]
    ]
    assert np.array(drawn) == pytest.approx(np.array(wanted))
    assert axis.get_xlabel() == "milliseconds"
    assert [own.get_text() for own in axis.get_yticklabels()] == [
        "gamma 2",
        "target alone",
    ]
    # Each kind has a colour of its own, and the legend names it.
    kinds = [kind for lane in lanes for kind, _, _ in lane["parts"]]
    colours = {}
    for kind, own in zip(kinds, axis.collections, strict=True):
        colours.setdefault(kind, set()).add(tuple(own.get_facecolor()[0]))
    assert all(len(own) == 1 for own in colours.values())
    assert len(set.union(*colours.values())) == len(colours) == 5
    assert all(f">{kind}<" in texts(figure) for kind in colours)


def test_no_picture_is_left_open():
    """Figures are their own: nothing warns when many are made."""
    from matplotlib import _pylab_helpers

    decode_plots.block_lengths([1, 2])
    assert not _pylab_helpers.Gcf.get_all_fig_managers()
