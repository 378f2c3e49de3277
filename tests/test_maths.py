"""Formulas: found where Pandoc finds them, typeset, put in their places; and the fonts for them."""

import io
from pathlib import Path

import markdown
import pytest
from fontTools.ttLib import TTFont

from hooks import maths, parts
from hooks.maths import find_maths, put_maths, typeset
from hooks.run import read_entry

ROOT = Path(__file__).parent.parent


def found(prose):
    """Return the formulas of `prose`, as (tex, display)."""
    return [(formula.tex, formula.display) for formula in find_maths(prose, 1)[1]]


def page(prose, numbers=None):
    """Return the HTML of `prose`, each formula as its TeX between angle quotes."""
    text, formulas = find_maths(prose, 1)
    html = markdown.markdown(text, extensions=["admonition", "tables", "md_in_html", "attr_list"])
    return put_maths(html, formulas, [f"‹{formula.tex}›" for formula in formulas], numbers or {})


@pytest.mark.parametrize(
    ("prose", "formulas"),
    [
        ("a $x_1$ and $y$.", [("x_1", False), ("y", False)]),
        ("over a line: $a +\nb$", [("a +\nb", False)]),
        ("$5 and $6 are prices, $ x $ is nothing", []),
        ("it costs $5 or 6$7", []),
        (r"a dollar: \$5 and \$6", []),
        (r"$\text{\$5}$", [(r"\text{\$5}", False)]),
        ("`$x$` and ``a ` $b$`` and $c$", [("c", False)]),
        ("```text\n$x$ $$\n```\n\n$c$", [("c", False)]),
        ("    ~~~\n    $$\n    ~~~", []),
        ("<!-- $x$ --> $c$", [("c", False)]),
        ("not over\n\na paragraph: $a\n\nb$", []),
        ("$$x$$", [("x", True)]),
        ("$$\nx\n$$", [("x", True)]),
        ("| $a$ | $$b$$ |", [("a", False), ("b", True)]),
    ],
)
def test_find(prose, formulas):
    assert found(prose) == formulas


def test_dollar_that_is_a_dollar():
    assert "cost $5" in markdown.markdown(find_maths(r"cost \$5", 1)[0]).replace("&#36;", "$")


def test_label_and_line():
    _, formulas = find_maths("text $a$\n\n- $b$\n\n$$\nc\n$$ {#eq-key}\n", 40)
    assert [(formula.label, formula.line) for formula in formulas] == [
        (None, 40),
        (None, 42),
        ("eq-key", 44),
    ]


def test_open_display_is_an_error_with_its_line():
    with pytest.raises(ValueError) as error:
        find_maths("one\n\ntwo $$ x", 5)
    assert error.value.args == (7, "this $$ is never closed")


def test_tokens_are_words_and_unique():
    text, formulas = find_maths("$a$ $$a$$ $a$ $*b*_c_$", 1)
    tokens = [formula.token for formula in formulas]
    assert len(set(tokens)) == 3
    assert all(token.isalnum() for token in tokens)
    assert text.split() == tokens


def test_inline_formula_stays_in_its_sentence():
    assert page("so *$x_1$* is $y_2$.") == "<p>so <em>‹x_1›</em> is ‹y_2›.</p>"
    assert page("$x$") == "<p>‹x›</p>"


def test_display_is_a_block_with_its_number_beside_it():
    html = page("before\n$$\nx\n$$ {#eq-a}\nafter", {"eq-a": "2.1"})
    assert html.splitlines() == [
        "<p>before</p>",
        '<div class="book-equation" id="eq-a"><div class="book-scroll">‹x›</div>'
        '<span class="book-number">(2.1)</span></div>',
        "<p>after</p>",
    ]


@pytest.mark.parametrize(
    "prose", ["!!! note\n    $$\n    x\n    $$\n\n    more", "- item\n\n    $$ x $$\n"]
)
def test_display_within_a_block(prose):
    html = page(prose)
    assert '<div class="book-equation"><div class="book-scroll">‹x›</div></div>' in html
    assert "<p><div" not in html


def test_display_in_a_cell_of_a_table():
    html = page("| a |\n|---|\n| $$x$$ |\n")
    assert (
        '<td><span class="book-equation"><span class="book-scroll">‹x›</span></span></td>' in html
    )


def test_typeset_gives_html_and_mathml_and_no_tex(tmp_path):
    formulas = [(r"\mathbf{q}^\top x", False), (r"\frac{1}{2}", True)]
    inline, display = typeset(formulas, tmp_path / "maths.json", ROOT)
    assert inline.startswith('<span data-search-exclude class="katex">')
    assert display.startswith('<span data-search-exclude class="katex-display">')
    assert "<math" in inline
    assert "mathbf{" not in inline  # nothing that looks like TeX left to find in the page


@pytest.mark.parametrize("bad", [r"\frac{a", r"\foo", r"a & b", r"\begin{aligned} x"])
def test_bad_formula_is_told_with_its_place(tmp_path, bad):
    with pytest.raises(ValueError) as error:
        typeset([("x", False), (bad, True), (bad, False)], tmp_path / "maths.json", ROOT)
    assert error.value.args[0] == 1
    assert error.value.args[1].startswith("KaTeX parse error: ")
    assert "\u0332" not in error.value.args[1]  # which would underline it, illegibly


def test_nothing_new_starts_no_node(tmp_path, monkeypatch):
    cache, formulas = tmp_path / "maths.json", [("x", False), ("x", True), ("x", False)]
    first = typeset(formulas, cache, ROOT)
    assert first[0] == first[2] != first[1]
    monkeypatch.setattr(maths, "ask_katex", lambda *_: pytest.fail("KaTeX was asked again"))
    assert typeset(formulas, cache, ROOT) == first
    assert typeset([], cache, ROOT) == []


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"0.1 0 x": "old"}', "null"])
def test_damaged_cache_is_made_again(tmp_path, damage):
    cache = tmp_path / "maths.json"
    cache.write_text(damage)
    assert "katex" in typeset([("x", False)], cache, ROOT)[0]
    assert len(read_entry(cache)) == 1


def test_fonts_are_smaller_and_hold_what_is_shown(tmp_path):
    formula = r"\mathbf{q} \in \mathbb{R}^D, \alpha < 2"
    drawn = typeset([(formula, False)], tmp_path / "maths.json", ROOT)
    files = parts.npm_files(ROOT, set("é−"), drawn, tmp_path)
    assert files == parts.npm_files(ROOT, set("é−"), drawn, tmp_path)  # the second from the cache
    assert sum(len(content) for name, content in files.items() if "assets/fonts" in name) < 45_000
    for name, letters in {
        "katex/fonts/KaTeX_Main-Bold": "q",
        "katex/fonts/KaTeX_AMS-Regular": "R",
        "katex/fonts/KaTeX_Math-Italic": "Dα",
        "katex/fonts/KaTeX_Main-Regular": "∈,<2",
        "fonts/literata-latin-400-normal": "aZ~é−",
    }.items():
        font = TTFont(io.BytesIO(files[f"assets/{name}.woff2"]))
        assert {ord(letter) for letter in letters} <= set(font.getBestCmap())


def test_styles_ask_only_for_files_that_are_there(tmp_path):
    files = parts.npm_files(ROOT, set(), [], tmp_path)
    for style, folder in (
        (files["assets/katex/katex.min.css"].decode(), "assets/katex"),
        ((ROOT / "docs/assets/book.css").read_text(), "assets"),
    ):
        asked = {piece.partition(")")[0].strip('"') for piece in style.split("url(")[1:]}
        assert asked
        assert {f"{folder}/{name}" for name in asked} <= set(files)
