"""Figures in the page: one drawing for light and dark, and the colours that make it so."""

import io
import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from hooks.figures import VARIABLES, inline_svg
from snippets import plotting

ROOT = Path(__file__).parent.parent
STYLE = (ROOT / "docs/assets/book.css").read_text(encoding="utf-8")
ALT = "A drawing that shows <two> things & more"


def colours_of(scheme):
    """Return the --book variables of one scheme of the style sheet."""
    start = STYLE.index(f'[data-md-color-scheme="{scheme}"] {{')
    block = STYLE[start : STYLE.index("}", start)]
    return dict(re.findall(r"(--book-[\w-]+): (#\w{6});", block))


def luminance(colour):
    """Return the relative luminance of WCAG."""
    shares = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one, other):
    """Return the contrast ratio of WCAG."""
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def drawn(draw, prefix="fig-x"):
    """Return what the page gets of a figure, as text and parsed."""
    figure, axes = plotting.new_figure()
    draw(axes)
    file = io.StringIO()
    figure.savefig(file, format="svg")
    text = inline_svg(file.getvalue(), prefix=prefix, alt=ALT)
    return text, ElementTree.fromstring(re.sub("data-search-exclude|xlink:", "", text))


def curves(axes):
    """Draw something of everything."""
    for index in range(5):
        plotting.line(axes, [0, 1], [0, index], index, label=f"line {index}")
        plotting.dots(axes, [0, 1], [0, index], index, alpha=0.4)
    axes.grid()


def test_colours_agree_in_the_three_places():
    light = colours_of("default")
    assert light["--book-ink"] == plotting.INK
    assert light["--book-rule"] == plotting.RULE
    assert light["--book-paper"] == plotting.PAPER
    assert light["--book-accent"] == plotting.ACCENT
    series = [light[f"--book-series-{number}"] for number in range(1, 6)]
    assert series == list(plotting.SERIES)
    for colour, variable in VARIABLES.items():
        assert colour in (light[variable], "#000000", "#ffffff")
    assert set(light) == set(colours_of("slate"))


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_colours_can_be_told_apart(scheme):
    colours = colours_of(scheme)
    paper = colours["--book-paper"]
    series = [colours[f"--book-series-{number}"] for number in range(1, 6)]
    texts = ["ink", "quiet", "accent", "hover", "right", "wrong"]
    code = ["comment", "string", "number", "keyword", "name", "ink", "quiet"]
    assert all(contrast(colour, paper) >= 4.5 for colour in series)  # their labels are text
    assert all(contrast(colours[f"--book-{name}"], paper) >= 4.5 for name in texts)
    assert all(contrast(colours[f"--book-{name}"], colours["--book-tint"]) >= 4.5 for name in code)
    lightness = [np.cbrt(luminance(colour)) for colour in series]  # differs in grey as well
    assert min(abs(a - b) for a, b in itertools.combinations(lightness, 2)) > 0.02


def test_figure_follows_the_scheme_and_the_font_of_the_page():
    text, root = drawn(curves)
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b(?!-)", re.sub(r'(href="|url\()#', "", text))
    assert "font-family" not in text
    assert "var(--book-series-5)" in text
    assert [element.text for element in root.iter("text")][-1] == "line 4"
    assert "\n" not in text  # a blank line would end the HTML in Markdown


def test_figure_can_be_heard():
    _, root = drawn(curves)
    picture = root.find("svg")
    assert picture.get("role") == "img"
    assert picture.get("aria-label") == ALT
    assert picture.get("style") == "--width:326"  # 3.4 inches, in the pixels of CSS
    assert not list(root.iter("metadata"))


def test_ids_are_unique_and_lead_somewhere():
    text, root = drawn(curves, prefix="fig-one")
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    asked = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert all(name.startswith("fig-one-") for name in ids)
    assert {one or other for one, other in asked} == set(ids)
    assert not re.search(r"<use[^>]* href=", text)  # instant navigation would stumble over it
    assert not set(ids) & set(re.findall(r'id="([^"]+)"', drawn(curves, prefix="fig-two")[0]))


def test_same_bytes():
    assert drawn(curves)[0] == drawn(curves)[0]


def test_heat_map_stays_small_and_keeps_every_square():
    weights = np.random.default_rng(0).dirichlet(np.ones(40), 40)
    text, root = drawn(lambda axes: plotting.heatmap(axes, weights, vmax=0.2))
    shown = sum(
        path.get("d", "").count("M")
        for path in root.iter("path")
        if "book-accent" in path.get("style", "")
    )
    assert shown == (weights / 0.2 * 101 >= 1).sum()  # what is less than a hundredth is nothing
    assert len(text) < 80_000


def test_unknown_colour_is_an_error():
    with pytest.raises(ValueError, match="#ff0000; use those"):
        drawn(lambda axes: axes.plot([0, 1], color="red"))


def test_raster_is_an_error():
    with pytest.raises(ValueError, match="raster"):
        drawn(lambda axes: axes.imshow(np.random.default_rng(0).random((60, 60))))


def test_black_and_white_are_ink_and_paper():
    path = '<path fill="#FFF" stroke="#000000"/>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9">{path}</svg>'
    text = inline_svg(svg, prefix="p", alt=ALT)
    assert 'fill="var(--book-paper)"' in text
    assert 'stroke="var(--book-ink)"' in text
