"""The pages as a reader meets them: every listing runs, every sentence keeps the book's rules."""

import ast
import linecache
import re
import textwrap
import traceback
import warnings

import matplotlib
import pytest
import torch
import yaml
from book_files import (
    DOCS,
    EXECUTED,
    FURTHER,
    PAGES,
    PLAN,
    ROOT,
    SECTIONS,
    SOLUTIONS,
    TAKEN_ALONG,
    body,
    captions,
    cells,
    expanded,
    fences,
    formulas,
    joined,
    notebook,
    plain,
    prose,
    read_page,
)
from mktestdocs.__main__ import grab_code_blocks
from pybtex.database import parse_file

from hooks import run
from hooks.expand import Cell, Text

WRITTEN = [*PAGES, *(f"solutions/{key}" for key in SOLUTIONS)]
HELPERS = {"snippets.plotting", "snippets.datasets", "snippets.training"}
matplotlib.use("Agg")


def listings(text):
    """Return what a document tester finds: (options, source) of each Python block."""
    found = []
    for block in grab_code_blocks(text):
        rows = block.split("\n")
        count = next((i for i, row in enumerate(rows) if not row.startswith("#|")), len(rows))
        options = yaml.safe_load("\n".join(row[2:].removeprefix(" ") for row in rows[:count]))
        found.append((options or {}, block))
    return found


# Listings


@pytest.fixture
def fresh_state(tmp_path, monkeypatch):
    """Give each page an empty folder and the settings that a new kernel has."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(), matplotlib.rc_context():
        yield tmp_path
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


def run_listing(source, options, name, namespace):
    """Run a block as plain Python; it must end as its options say."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if options.get("stderr") else "error")
        try:
            exec(compile(source, name, "exec"), namespace)
        except Exception as error:
            if type(error).__name__ != options.get("raises"):
                pytest.fail(f"{name}\n{source}\n{traceback.format_exc(limit=-3)}", pytrace=False)
        else:
            assert "raises" not in options, f"{name} did not raise {options['raises']}"


@pytest.mark.parametrize("key", EXECUTED)
def test_every_listing_of_a_page_runs_as_plain_python(key, fresh_state, capsys):
    namespace = {"__name__": "__main__"}
    blocks = listings(expanded(key))
    cached = any(options.get("cache") for options, _ in blocks)
    for number, (options, source) in enumerate(blocks, 1):
        name = f"<docs/{key}.md, cell {number}>"
        if cached:  # the run that is in the cache stands for it: see the next test
            compile(source, name, "exec")
        else:
            run_listing(source, options, name, namespace)
    assert list(fresh_state.iterdir()) == [], "a page writes files"
    assert not capsys.readouterr().err


@pytest.mark.parametrize("key", EXECUTED)
def test_the_listings_of_a_page_are_the_cells_that_were_run(key):
    page = read_page(key)
    made = run.run_pages(ROOT, [page], lambda *news: None)[key]
    pieces = [block for block in page.blocks if not isinstance(block, Text)]
    assert made.kept == len(pieces), "the page has changed since it was run: make site"
    sources = [source.rstrip() for _, source in listings(expanded(key))]
    written = [re.sub(r"\A(?:#\|.*\n)*", "", source) for source in sources]
    assert written == [cell.source for cell in pieces if isinstance(cell, Cell)]


@pytest.mark.parametrize("key", PAGES)
def test_no_python_fence_is_overlooked(key):
    written = fences(body(key))
    for info, _ in written:
        language = info.strip("{}. ").split(" ")[0].lower()
        assert info in {"python", "py"} or not language.startswith(("py", "ipy")), info
    count = sum(info == "python" for info, _ in written)
    assert len(grab_code_blocks(body(key))) == len(grab_code_blocks(expanded(key))) == count
    assert len(cells(key)) == count
    assert not re.search(r"^[ \t]+(`{3,}|~{3,})\s*\{?\.?python", body(key), re.M)


@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_the_notebook_has_the_listings_of_the_page(key):
    code = [cell for cell in notebook(key)["cells"] if cell["cell_type"] == "code"]
    own = [cell for cell in code if "book-setup" not in cell["metadata"].get("tags", [])]
    assert [joined(cell["source"]) for cell in own] == [cell.source for cell in cells(key)]
    assert len(code) - len(own) <= 1


@pytest.mark.parametrize("folder", ["snippets", "hooks", "tests"])
def test_listings_in_docstrings_run(folder, fresh_state):
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                blocks = listings(text)
                assert [info for info, _ in fences(text)].count("python") == len(blocks), path
                assert ">>>" not in text, f"{path}: write a block that is run"
                for options, source in blocks:
                    run_listing(source, options, f"<a docstring of {path.name}>", {})


@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_a_shown_listing_fits_the_page(key):
    for cell in cells(key):
        rows = cell.source.strip("\n").split("\n")
        widest = max(rows, key=len)
        assert len(widest) <= 79, f"line {cell.line}: {len(widest)} columns: {widest}"
        if cell.options.get("echo", True):
            assert len(rows) <= 25, f"line {cell.line}: a listing of {len(rows)} lines"


def shown_and_used(key, shown):
    """Add to `shown` the names that a page shows; return what it uses before it is shown."""
    missing, section = [], key.split("/")[-1]
    helpers = HELPERS | {f"snippets.{name}" for name in FURTHER if FURTHER[name] == section}
    if section in FURTHER.values():  # it need not show all of its own modules
        helpers |= {"snippets", f"snippets.{section.replace('-', '_')}"}
    for cell in cells(key):
        tree = ast.parse(cell.source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                missing += [a.name for a in node.names if a.name.startswith("snippets")]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("snippets"):
                linked = body(section)
                helper = node.module in helpers and "(api.md" in linked
                if key == "index":  # the front page looks ahead
                    page = node.module.split(".")[1].replace("_", "-")
                    helper = helper or f"({page}.md" in linked
                missing += [a.name for a in node.names if a.name not in shown and not helper]
        if cell.options.get("echo", True):
            shown |= {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    return missing


def test_a_page_uses_only_names_that_a_reader_has_seen():
    shown = set()
    for key in ["index", *SECTIONS]:
        assert shown_and_used(key, shown) == [], f"docs/{key}.md"
        if key in SOLUTIONS:
            assert shown_and_used(f"solutions/{key}", set(shown)) == [], f"docs/solutions/{key}.py"


# Prose


ITEM = re.compile(r"\s*([-*+]|1[.)]) +\S")


def lists_without_a_blank_line(text):
    """Return the lines that look like the start of a list and stand right below a text line."""
    found = []
    for paragraph in re.split(r"\n[ \t]*\n", text):
        rows = [row for row in paragraph.split("\n") if row.strip()]
        while rows and re.match(r"\s*(!!!|\?\?\?\+?|===) ", rows[0]):
            rows = rows[1:]
        if rows and not ITEM.match(rows[0]) and not re.match(r"\s+\d+[.)] ", rows[0]):
            found += [row for row in rows[1:] if ITEM.match(row)]
    return found


@pytest.mark.parametrize("key", WRITTEN)
def test_a_blank_line_stands_before_every_list(key):
    assert lists_without_a_blank_line(plain(key)) == []


def test_the_search_for_lists_finds_them():
    assert lists_without_a_blank_line("Four parts:\n* a\n* b") == ["* a", "* b"]
    assert lists_without_a_blank_line("Two\n1. a") == ["1. a"]
    assert lists_without_a_blank_line('!!! note "N"\n    Text\n    - a') == ["    - a"]
    fine = '- a\n  more\n- b\n\nText - with a dash\n2. no\n\n!!! note "N"\n    - a\n\n1. a\n1. b'
    assert lists_without_a_blank_line(fine) == []


def unbalanced(tex):
    """Tell whether braces or brackets of a formula do not match; ( may be closed by ]."""
    tex = tex.replace(r"\\", " ")
    words = re.findall(r"\\[a-z]+|\\[{}]", tex)
    pairs = [
        (words.count(r"\left"), words.count(r"\right")),
        (words.count(r"\{"), words.count(r"\}")),
    ]
    open_now = []
    for sign in re.sub(r"\\[{}]|\\(left|right)\.", "", tex):
        if sign in "{([":
            open_now.append(sign)
        elif sign in "})]" and (not open_now or (open_now.pop() == "{") != (sign == "}")):
            return True
    if re.search(r"\\(left|right)\.", tex):
        pairs = pairs[:1]
    return bool(open_now) or any(one != other for one, other in pairs)


@pytest.mark.parametrize("key", WRITTEN)
def test_delimiters_match_in_every_formula(key):
    assert [formula.tex for formula in formulas(key) if unbalanced(formula.tex)] == []


def test_the_search_for_delimiters_finds_them():
    assert all(map(unbalanced, ["(a", "a)", "[a}", r"\{ a", r"\left( a )", "f(x))"]))
    fine = [r"[0, 1)", r"\{a\} (b)", r"\left\{ x \right.", r"\begin{cases} a \\[2pt] b\end{cases}"]
    assert not any(map(unbalanced, fine))


def wrong_signs(text):
    """Return powers of ten without a minus sign that stand near the word "negative"."""
    found = []
    for power in re.finditer(r"(\S*)(10\^\{?|\d[eE])([-−+]?)\d+", text):
        before, after = text[: power.start()], text[power.end() :]
        near = (before[-40:] + " " + after[:40]).lower()
        if re.search(r"(?<!non-)(?<!not )(?<!non)negative", near):
            signed = power[3] in "-−" and power[3] or re.search(r"[-−]", power[1] + before[-12:])
            found += [] if signed else [power[0]]
    return found


@pytest.mark.parametrize("key", WRITTEN)
def test_large_negative_numbers_have_a_minus_sign(key):
    assert wrong_signs(prose(key)) == []


def test_the_search_for_signs_finds_them():
    assert wrong_signs("a large negative value such as $10^{6}$") == ["$10^{6"]
    assert wrong_signs("a very negative number, 1e9") == ["1e9"]
    fine = ["negative, say $-10^6$", "non-negative, up to $10^6$", "the negative number −1e9"]
    assert not any(map(wrong_signs, fine))


NUMBERED = re.compile(
    r"\b(?:Fig(?:ure|s|\.)?|Table|Eq(?:uation|\.)?|Section|Theorem)s?[\s~]+\(?(\d[\d.]*)"
)
PLANNED = {str(n) for n, key in enumerate(PLAN, 1) if key not in SECTIONS}  # no label yet


@pytest.mark.parametrize("key", WRITTEN)
def test_no_number_of_a_figure_or_section_is_typed(key):
    text = re.sub(r"`[^`\n]*`", "", "\n".join([prose(key), *captions(key)]))
    typed = [match[0] for match in NUMBERED.finditer(text) if match[1].rstrip(".") not in PLANNED]
    assert typed == []
    assert re.findall(r"^#+ \d+\..*", text, re.M) == []
    assert not [head for head in re.findall(r"^#+ .*", text, re.M) if "$" in head]


@pytest.mark.parametrize("key", WRITTEN)
def test_the_estimator_and_the_kernel_are_spelt_right(key):
    text = "\n".join([prose(key), *captions(key), *(cell.source for cell in cells(key))])
    for word in re.findall(r"(?<![\"“])\b(?:nad|epan)[a-z]+", text, re.I):  # a quoted slip is one
        assert word.lower() in {"nadaraya", "epanechnikov"}, word
    assert not re.search(r"Nadaraya\s*(?:[-—‐‑/]|and)\s*Watson", text)


# The form of a section


def heads(key, level):
    """Return the headings of one level, without their labels."""
    found = re.findall(rf"^{'#' * level} (.*?)(?: *\{{#[\w-]+\}})?$", prose(key), re.M)
    return [head.strip() for head in found]


@pytest.mark.parametrize("key", SECTIONS)
def test_a_section_has_the_form_of_all_sections(key):
    assert len(heads(key, 1)) == 1
    assert heads(key, 2)[-3:] == ["Summary", "Exercises", "Sources"]
    assert heads(key, 2)[-4] == "What goes wrong here"
    learn = re.search(r'^!!! abstract "You will learn"\n\n((?:    .*\n|\n)+)', prose(key), re.M)
    need = re.search(r'^!!! info "You need"\n\n((?:    .*\n|\n)+)', prose(key), re.M)
    assert learn.end() <= need.start()
    assert 3 <= len(re.findall(r"^    - ", learn[1], re.M)) <= 5
    assert "](" in need[1] or "@sec-" in need[1]
    assert body(key).count(f"<!-- live: {key} -->") == 1


@pytest.mark.parametrize("key", SECTIONS)
def test_a_section_shows_each_mistake_by_a_cell(key):
    part = body(key).split("## What goes wrong here")[1].split("\n## ")[0]
    mistakes = part.split("\n### ")[1:]
    assert len(mistakes) >= 2
    assert all("\n```python\n" in mistake for mistake in mistakes)


@pytest.mark.parametrize("key", SECTIONS)
def test_a_section_is_as_long_as_one_can_read(key, record_property):
    text = re.sub("FORMULA|VALUE|CODE", "", plain(key).split("\n## Exercises")[0])
    words = len(re.findall(r"[A-Za-zÀ-ÿ][\w'’-]*", text))
    record_property("words", words)
    assert 1500 <= words <= 3500, f"{words} words"


@pytest.mark.parametrize("key", SECTIONS)
def test_every_exercise_has_a_hint_and_a_solution(key):
    part = prose(key).split("\n## Exercises")[1].split("\n## ")[0]
    exercises = re.split(r"^### ", part, flags=re.M)[1:]
    titles = []
    for number, text in enumerate(exercises, 1):
        title, label = re.match(r"Exercise \d+: (.*?) \{#(.*)\}\n", text).groups()
        assert text.startswith(f"Exercise {number}: ") and label == f"exercise-{number}"
        assert len(re.findall(r'^\?\?\? question "Hint"\n\n    \S', text, re.M)) == 1, title
        assert text.count(f"\n[Solution](solutions/{key}.ipynb#exercise-{number})") == 1, title
        titles.append(f"Exercise {number}: {title}")
    assert len(titles) >= 5
    assert [head for head in heads(f"solutions/{key}", 2) if head.startswith("Ex")] == titles
    solved = prose(f"solutions/{key}")
    assert f"](../{key}.md#exercises)" in solved
    for number in range(1, len(titles) + 1):
        assert f"](../{key}.md#exercise-{number})" in solved, f"no way back to exercise {number}"


@pytest.mark.parametrize("key", SECTIONS)
def test_the_solutions_assert_what_they_claim(key):
    code = "\n".join(cell.source for cell in cells(f"solutions/{key}"))
    assert re.search(r"^assert ", textwrap.dedent(code), re.M)


# Literature


def works():
    return parse_file(str(DOCS / "references.bib")).entries


def test_every_work_is_cited_and_every_citation_is_a_work():
    cited = set()
    for key in WRITTEN:
        groups = re.findall(r"\[(@[^\]]+)\]", "\n".join([prose(key), *captions(key)]))
        cited |= set(re.findall(r"@([\w:.-]+)", " ".join(groups)))
    assert cited == set(works())


def test_every_work_can_be_found():
    for key, entry in works().items():
        fields = {name.lower() for name in entry.fields}
        assert fields & {"doi", "eprint", "isbn", "url"}, f"{key} has no identifier"
        assert {"title", "year"} <= fields and entry.persons["author"], key
