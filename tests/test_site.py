"""The built site, read as files: what must not be there, and what must."""

import functools
import gzip
import json
import re
import urllib.parse
from collections import Counter

import nbformat
import pytest
from book_files import (
    EXECUTED,
    PAGES,
    SECTIONS,
    SITE,
    SOLUTIONS,
    TAKEN_ALONG,
    built,
    captions,
    cells,
    expanded,
    formulas,
    home,
    html_of,
    html_pages,
    joined,
    notebook,
    plain,
    soup,
    target,
    text_of,
)
from bs4 import Comment

HTML = html_pages()
CODE = {"pre", "code", "samp", "script", "style", "svg", "math", "annotation", "noscript"}
LOADED = "script[src], img[src], source[src], iframe, object, embed, audio[src], video[src]"
LINKED = "link[rel~=stylesheet], link[rel~=icon], link[rel~=preload], link[rel~=manifest]"


def folder_files(*suffixes):
    """Return the text files of the site that have one of the suffixes."""
    return sorted(str(p.relative_to(SITE)) for p in built().rglob("*") if p.suffix in suffixes)


@functools.cache
def visible(name):
    """Return the text of a page that stands outside of code and drawings."""
    found = []
    for text in soup(name).body.find_all(string=True):
        if not isinstance(text, Comment) and not {p.name for p in text.parents} & CODE:
            found.append(text)
    return "\n".join(found)


@functools.cache
def ids(name):
    """Return how often each id stands in a page."""
    return Counter(tag["id"] for tag in soup(name).select("[id]"))


# What must not be there


TRACES = {
    "a traceback": r"Traceback \(most recent call last\)",
    "an include that was not expanded": r"--8(<|&lt;|\\u003c)--",
    "a slot that was not filled": r"bkslot\d{5}z",
    "a formula that was not drawn": r"kxm[0-9a-f]{16}x",
    "a path of the machine": r"(?<![\w/.:-])/(?:home|root|tmp|work|Users|build|builds)/[\w.]",
    "an installed package's file": r"site-packages|dist-packages",
    "a progress bar": r"\d ?it/s|\d%\|",
    "a warning": r"(?:Deprecation|User|Future|Runtime|Syntax)Warning:",
    "a generic alternative text": r"No description has been provided",
    "an address of memory": r"\bat 0x[0-9a-f]{6,}",
    "a raster picture": r"data:image/(?:png|jpe?g|gif|webp)",
}


@pytest.mark.parametrize("what", TRACES)
def test_nothing_made_holds(what):
    for name in folder_files(".html", ".ipynb", ".py", ".json"):
        found = re.search(TRACES[what], text_of(name))
        assert not found, f"{name}: {text_of(name)[found.start() - 80 : found.end() + 80]}"


RAW = {
    "an admonition": r"^\s*(?:!!!|\?\?\?\+?) \w",
    "a tab": r'=== "',
    "an attribute list": r"\{ ?[.#:][\w-]",
    "an inline value": r"\{python\}",
    "a formula": r"\$\$|\$[^\s$][^$\n]*\$|\\\(|\\\[|\\begin\{|\\(?:frac|mathbf|alpha|sum)\b",
    "a citation": r"\[@|@[a-z]+\d{4}",
    "a reference": r"(?<!\w)@(?:fig|tbl|eq|sec|thm)-",
    "a fence": r"```|~~~",
    "a list": r"^\s*[*+-] \w",
    "a docstring directive": r"^:::",
    "an option": r"#\|",
    "an image": r"!\[",
    "emphasis": r"(?<![\w*])\*\*\w",
}


@pytest.mark.parametrize("what", RAW)
def test_no_markup_is_left_as_text(what):
    for name in HTML:
        if not name.startswith("third-party"):  # it shows licences as they are
            found = re.search(RAW[what], visible(name), re.M)
            assert not found, f"{name}: {visible(name)[found.start() - 80 : found.end() + 80]!r}"


def test_no_output_has_a_carriage_return_or_a_colour_code():
    for key in TAKEN_ALONG:
        for cell in notebook(key)["cells"]:
            for output in cell.get("outputs", []):
                assert output.get("name") != "stderr" or "Warning" not in joined(output["text"])
                assert not re.search("[\r\x1b]", joined(output.get("text", ""))), key


@pytest.mark.parametrize("name", HTML)
def test_no_address_and_no_listing_is_empty(name):
    for tag in soup(name).select("[src], a[href], link[href]"):
        assert tag.get("src", "x").strip() and tag.get("href", "x").strip(), tag
    for tag in soup(name).select("article pre, article code, article samp, article figure"):
        assert tag.get_text().strip() or tag.select("svg"), f"empty: {tag.parent}"


# Links


@pytest.mark.parametrize("name", [*HTML, "404.html"])
def test_every_link_and_anchor_leads_somewhere(name):
    for tag in soup(name).select("[href], [src]"):
        href = tag.get("href") or tag["src"]
        place = target(name, href)
        if tag.name == "use" or href.startswith(("mailto:", "data:")) or place is None:
            assert not href.endswith((".md", ".ipynb")) or place, href
            continue
        file, fragment = place
        assert (SITE / file).is_file(), f"{href} leads to no file"
        assert not file.endswith((".md", ".ipynb")) or tag.has_attr("download"), href
        if fragment and file.endswith(".html"):
            assert urllib.parse.unquote(fragment) in ids(file), f"{href}: no such place"


@pytest.mark.parametrize("name", HTML)
def test_links_do_not_depend_on_where_the_site_stands(name):
    for tag in soup(name).select("[href], [src]"):
        href = tag.get("href") or tag["src"]
        if "canonical" not in (tag.get("rel") or []):
            assert not href.startswith(("/", home())), href


@pytest.mark.parametrize("name", HTML)
def test_drawings_refer_to_what_they_hold(name):
    text = text_of(name)
    used = re.findall(r"url\(#([^)]+)\)|<use [^>]*href=\"#([^\"]+)\"", text)
    assert {one or other for one, other in used} <= set(ids(name))


@pytest.mark.parametrize("name", [*HTML, "404.html"])
def test_nothing_is_loaded_from_elsewhere(name):
    for tag in soup(name).select(f"{LOADED}, {LINKED}"):
        assert target(name, tag.get("src") or tag.get("href") or "") is not None, tag
    assert not re.search(r"@import|url\(['\"]?(?:https?:)?//", text_of(name))


def test_no_style_loads_from_elsewhere_and_all_it_loads_is_there():
    for name in folder_files(".css"):
        for url in re.findall(r"url\(['\"]?([^)'\"]+)", text_of(name)):
            if not url.startswith(("data:", "#")):
                place = target(name, url)
                assert place and (SITE / place[0]).is_file(), f"{name}: {url}"
        assert "@import" not in text_of(name), name


@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_links_of_a_notebook_lead_into_the_site(key):
    for cell in notebook(key)["cells"]:
        for href in re.findall(r"\]\(([^)\s]+)\)", joined(cell["source"])):
            if cell["cell_type"] != "markdown":
                continue
            assert href.startswith(("http://", "https://")), href
            if place := target(f"downloads/{key}.ipynb", href):
                assert (SITE / place[0]).is_file(), href
                assert not place[1] or place[1] in ids(place[0]), href


# The form of a page


@pytest.mark.parametrize("name", HTML)
def test_a_page_has_one_title_and_skips_no_level(name):
    page = soup(name)
    assert page.html["lang"] == "en"
    assert len(page.select("h1")) == 1 and len(page.select("main")) == 1
    levels = [int(tag.name[1]) for tag in page.select("article :is(h1, h2, h3, h4, h5, h6)")]
    assert levels[0] == 1
    assert all(below <= above + 1 for above, below in zip(levels, levels[1:], strict=False)), levels
    assert page.title.get_text().strip() and page.select_one("meta[name=description]")["content"]


@pytest.mark.parametrize("name", HTML)
def test_ids_are_unique_in_a_page(name):
    assert [name for name, count in ids(name).items() if count > 1] == []


@pytest.mark.parametrize("name", HTML)
def test_every_picture_has_a_text_that_says_something(name):
    for tag in soup(name).select(
        "article :is(svg[role=img], img), .book-figure .book-scroll > svg"
    ):
        text = tag.get("aria-label") or tag.get("alt") or ""
        assert len(text) >= 20 and " " in text, f"{text!r} for {str(tag)[:120]}"
        assert not re.search(r"[$`{}]|\*\*|@fig", text), text
    for tag in soup(name).select("img"):
        assert tag.get("alt"), tag


@pytest.mark.parametrize("name", HTML)
def test_the_footer_names_both_licences(name):
    footer = soup(name).select_one("footer").get_text()
    assert "CC BY-SA 4.0" in footer and "MIT" in footer


# What must be there


@pytest.mark.parametrize("key", EXECUTED)
def test_a_page_offers_its_notebook_and_its_script(key):
    links = {target(html_of(key), a["href"])[0] for a in soup(html_of(key)).select("a[download]")}
    assert links == {f"downloads/{key}.ipynb", f"downloads/{key}.py"}
    assert all((SITE / link).stat().st_size > 200 for link in links)


@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_every_output_of_the_run_stands_in_the_page(key):
    code = [cell for cell in notebook(key)["cells"] if cell["cell_type"] == "code"]
    given = [output for cell in code for output in cell["outputs"]]
    shown = soup(html_of(key)).select(".book-output, .book-figure, .book-table")
    assert len(shown) == len(given)
    printed = [joined(output["text"]).rstrip("\n") for output in given if "text" in output]
    texts = [tag.pre.get_text() for tag in shown if "book-output" in tag["class"]]
    assert [text for text in printed if text not in texts] == []


@pytest.mark.parametrize("key", SECTIONS)
def test_a_section_shows_figures_results_and_failures(key):
    page = soup(html_of(key))
    assert len(page.select(".book-figure svg")) >= 2
    assert page.select(".book-output") and page.select(".book-failure")
    assert page.select("details.book-check")
    assert page.select(".admonition.abstract") and page.select(".admonition.info")


@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_every_listing_of_a_page_is_shown_as_it_was_run(key):
    page = soup(html_of(key))
    shown = [tag.get_text().strip("\n") for tag in page.select("article .highlight code")]
    wanted = [cell.source.strip("\n") for cell in cells(key) if cell.options.get("echo", True)]
    assert [source for source in wanted if source not in shown] == []


@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_every_formula_of_the_source_is_drawn_with_mathml(key):
    page = soup(html_of(key))
    count = len(formulas(key))
    assert len(page.select("article .katex-mathml math")) == count
    assert len(page.select("article .katex-html")) == count
    assert not page.select(".katex-error, annotation")
    if key.removeprefix("solutions/") in SECTIONS:
        assert count > 0


@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_numbers_count_up_from_one(key):
    page = soup(html_of(key))
    marks = [tag.get_text() for tag in page.select("article .book-number")]
    for pattern in r"Figure (\S+)\.", r"Table (\S+)\.", r"\((\S+)\)":
        found = [match[1] for mark in marks if (match := re.fullmatch(pattern, mark))]
        assert [int(number.rpartition(".")[2]) for number in found] == [
            *range(1, len(found) + 1)
        ], found
    if key in SECTIONS:
        own = str(SECTIONS.index(key) + 1)
        assert {mark.strip("().S").split(" ")[-1].split(".")[0] for mark in marks} == {own}


@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_every_figure_has_its_caption(key):
    page = soup(html_of(key))
    found = [tag.get_text() for tag in page.select("figure[id] figcaption")]
    assert len(found) == len(captions(key)) == len(page.select("figure[id]"))
    assert all(len(text) > 20 for text in found), found


def test_measured_times_are_given_by_two_digits():
    for name in HTML:
        for tag in soup(name).select("span[data-timing]"):
            for number in re.findall(r"[\d.,]*\d", tag.get_text()):
                digits = number.replace(",", "").replace(".", "").lstrip("0").rstrip("0")
                assert len(digits) <= 2, f"{name}: {tag.get_text()}"


# Search


@functools.cache
def search_entries():
    return json.loads(text_of("search/search_index.json"))["docs"]


def test_the_search_index_is_small():
    size = len(gzip.compress((built() / "search/search_index.json").read_bytes(), 9))
    assert size <= 150_000, f"{size} bytes"


def test_the_search_finds_prose_and_names_of_code():
    texts = {}
    for entry in search_entries():
        page = entry["location"].partition("#")[0]
        texts[page] = texts.get(page, "") + " " + entry["title"] + " " + entry["text"]
    for key in SECTIONS:
        words = set(re.findall(r"\w{5,}", texts[f"{key}/"]))
        prose = set(re.findall(r"\b[a-z]{6,}\b", plain(key).split("## Exercises")[0]))
        assert len(prose & words) > 0.9 * len(prose)
        shown = [cell.source for cell in cells(key) if cell.options.get("echo", True)]
        defined = {name for code in shown for name in re.findall(r"^def (\w{5,})", code, re.M)}
        assert defined <= words, defined - words
    for key in SOLUTIONS:
        assert len(texts[f"solutions/{key}/"]) > 200, "solutions cannot be found"


def test_the_search_skips_outputs_drawings_and_the_code_of_solutions():
    found = json.dumps([entry["text"] for entry in search_entries()], ensure_ascii=False)
    found = re.sub(r"\W+", " ", re.sub(r"<[^>]*>", " ", found))
    assert not re.search(r"<svg|<path|<math|katex", text_of("search/search_index.json"))
    for key in TAKEN_ALONG:
        rows = []
        for cell in notebook(key)["cells"]:
            texts = [joined(o["text"]) for o in cell.get("outputs", []) if "text" in o]
            if key.startswith("solutions/") and cell["cell_type"] == "code":
                texts.append(joined(cell["source"]))
            if "book-setup" not in cell["metadata"].get("tags", []):
                rows += [row for text in texts for row in text.splitlines()]
        allowed = re.sub(r"\W+", " ", "".join(map(expanded, PAGES)))
        for row in rows:
            words = re.sub(r"\W+", " ", row).strip()
            if len(words) > 30 and words not in allowed:
                assert words not in found, f"{key}: {row}"


# Notebooks as files


@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_a_notebook_is_valid_and_names_its_licences(key):
    nbformat.validate(nbformat.from_dict(notebook(key)))
    last = notebook(key)["cells"][-1]
    assert last["cell_type"] == "markdown"
    assert "CC BY-SA 4.0" in joined(last["source"]) and "MIT" in joined(last["source"])
    numbers = [cell["id"] for cell in notebook(key)["cells"]]
    assert numbers == [f"cell-{n}" for n in range(len(numbers))]
