"""What every figure and table of the book relies on."""

import io
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from snippets import plotting
from snippets.plotting import colour_bar, dots, heatmap, label_line, line, new_figure, table

TEXT = "{http://www.w3.org/2000/svg}text"


def saved(figure):
    """Return the figure as the site gets it."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def test_new_figure_has_its_size_and_is_shown_once():
    figure, axes = new_figure(1, 2, width=5, height=2, sharey=True)
    assert tuple(figure.get_size_inches()) == (5, 2)
    assert len(axes) == 2
    assert figure.number not in plt.get_fignums()  # or a notebook would show it a second time


def test_same_figure_same_bytes():
    def draw():
        figure, axes = new_figure()
        line(axes, [0, 1, 2], [0, 1, 4], 0, label="square")
        heatmap(axes, np.eye(3))
        return saved(figure)

    assert draw() == draw()


def test_heatmap_is_vectors_whose_opacity_is_the_weight():
    figure, axes = new_figure()
    weights = torch.tensor([[0.0, 1.0], [0.25, 0.75], [0.5, 0.5]], requires_grad=True)
    mesh = heatmap(axes, weights)
    assert mesh.get_array().shape == (3, 2)  # rows are queries, columns are keys
    assert "<image" not in saved(figure)
    colours = mesh.get_facecolors()
    assert {to_hex(colour) for colour in colours} == {plotting.ACCENT}
    np.testing.assert_allclose(colours[:, 3], weights.detach().flatten(), atol=0.005)
    assert axes.yaxis_inverted()  # the first query at the top


def test_heatmap_keeps_to_one_scale():
    _, axes = new_figure()
    mesh = heatmap(axes, [[0.1, 0.2]], vmax=0.4)
    assert mesh.get_clim() == (0, 0.4)
    _, axes = new_figure()
    assert heatmap(axes, [[0.1, 0.2]]).get_clim() == (0, 1)


def test_heatmap_names_its_rows_and_columns():
    _, axes = new_figure()
    heatmap(axes, np.ones((2, 3)), xlabels=["a", "cat", "sat"], ylabels=["x", "y"])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "cat", "sat"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["x", "y"]
    np.testing.assert_allclose(axes.get_xticks(), [0.5, 1.5, 2.5])


@pytest.mark.parametrize("count", [1, 2, 5, 50])
def test_heatmap_without_names_counts(count):
    _, axes = new_figure()
    heatmap(axes, np.ones((count, count)))
    texts = [int(label.get_text()) for label in axes.get_xticklabels()]
    assert texts[0] == 0
    assert all(0 <= text < count for text in texts)
    np.testing.assert_allclose(axes.get_xticks(), np.array(texts) + 0.5)


def test_colour_bar_says_what_the_colour_means():
    figure, axes = new_figure(1, 2)
    bar = colour_bar(figure, list(axes), vmax=0.5, label="share")
    assert list(bar.get_ticks()) == [0, 0.25, 0.5]
    assert bar.ax.get_ylabel() == "share"
    assert "<image" not in saved(figure)


def test_series_differ_by_more_than_colour():
    _, axes = new_figure()
    lines = [line(axes, [0, 1], [0, 1], index) for index in range(5)]
    points = [dots(axes, [0, 1], [0, 1], index) for index in range(5)]
    assert [drawn.get_color() for drawn in lines] == list(plotting.SERIES)
    assert len({str(dash) for dash in plotting.DASHES}) == 5
    assert len({drawn.get_marker() for drawn in points}) == 5
    assert {drawn.get_linestyle() for drawn in points} == {"None"}


def test_options_win_over_the_style():
    _, axes = new_figure()
    assert line(axes, [0], [0], 1, color=plotting.INK, linewidth=3).get_color() == plotting.INK


def test_label_stands_at_the_end_of_its_line():
    figure, axes = new_figure()
    line(axes, [0, 1, 2], [5, 6, 7], 1, label="rising")
    label_line(axes, 1.0, 6.0, "here", 2)
    assert [note.xy for note in axes.texts] == [(2, 7), (1, 6)]
    assert [to_hex(note.get_color()) for note in axes.texts] == list(plotting.SERIES[1:3])
    texts = {element.text for element in ElementTree.fromstring(saved(figure)).iter(TEXT)}
    assert {"rising", "here"} <= texts  # as text, not as shapes


def test_table_as_markdown_and_html():
    shown = table(["kernel", "error"], [["a|b", 0.5], ["<c>", "−1.25"]])
    assert shown._repr_markdown_() == (
        "| kernel | error |\n| :--- | ---: |\n| a&#124;b | 0.5 |\n| <c> | −1.25 |"
    )
    markup = shown._repr_html_()
    assert markup.count("<tr>") == 3
    assert "&lt;c&gt;" in markup
    assert '<td style="text-align: right">0.5</td>' in markup


def test_table_has_no_empty_heading():
    assert table(["", "a"], [["b", 1]])._repr_html_().count("<th ") == 1


def test_table_alignment():
    assert table(["a", "b"], [["1%", "x"], ["1,024", "2"]]).align == "rl"
    assert table(["a", "b"], [], align="cr").align == "cr"


def test_table_with_a_short_row():
    with pytest.raises(ValueError, match="2 columns"):
        table(["a", "b"], [["only"]])
