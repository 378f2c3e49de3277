"""Render a page that has run: as Markdown for the site, and as a notebook.

What Markdown must not touch (output, drawings, formulas) is put behind a
slot, a word that survives every Markdown reader; `fill` puts it back when
the HTML is there.
"""

import ast
import html
import posixpath
import re
from functools import partial
from symtable import symtable
from textwrap import indent
from typing import NamedTuple

import jupytext
import markdown
import nbformat
from markdown.extensions.toc import slugify
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from hooks.expand import BookError, Cell, Inline, Text, outside_code
from hooks.figures import inline_svg
from hooks.maths import find_maths

CITE = re.compile(r"\[(@[\w:.-]+(?:; ?@[\w:.-]+)*)\]")
REFER = re.compile(r"(?<![\w@/.\\])@([a-z]{2,4}-[a-z0-9-]*[a-z0-9])")
HEAD = re.compile(r"^(#{1,3}) (.+?)(?: \{#([\w-]+)\})?$", re.M)
THEOREM = re.compile(r'^( *)!!! theorem "(.*)" \{#(thm-[\w-]+)\}$', re.M)
LABEL = re.compile(r"^## |\{#((?:eq|thm|sec)-[\w-]+)\}", re.M)
EQUATION = re.compile(r"\$\$[ \t]*\{#(eq-[\w-]+)\}")
LINK = re.compile(r"\]\((?!\w+:)([\w./-]+)\.(?:md|ipynb)(?:#([\w-]+))?\)")
SLOT = re.compile(r"bkslot\d{5}z|kxm[0-9a-f]{16}x")
FILLED = re.compile(
    r"(?:<p>)?<i data-search-exclude>bkslot(\d{5})z</i>(?:\n<code>[^<]*</code>)?(?:</p>)?"
)
SHOWN = re.compile(r'<div class="(?:language-\w+ )?highlight">.*?</div>', re.DOTALL)
PLAIN = re.compile(r'<span class="(?:w|n|p|ow?|m[if]|nb|bp|s[ia]|fm|nn)">([^<]*)</span>')
NAME = re.compile(r"\b[^\W\d]\w{2,}")
LISTING = HtmlFormatter(wrapcode=True, cssclass="language-python highlight")
SCROLL = '<div class="book-scroll" tabindex="0" role="group" aria-label="Table">{}</div>'
CHECKED = '<details class="book-check" markdown="1"><summary>checked</summary>\n\n{}\n</details>\n'
PRINTED = '<div class="{}" data-search-exclude><pre tabindex="0"><samp>{}</samp></pre></div>'
ERROR = 'f"{type(error).__name__}: {error}"'
KINDS = {"fig": "Figure", "tbl": "Table", "eq": "Equation", "sec": "Section", "thm": "Theorem"}
BRING = """# The book's own modules, so that this notebook needs nothing but its packages.
import sys
import tempfile
from pathlib import Path

FILES = {{}}
{}FOLDER = Path(tempfile.mkdtemp())
for name, source in FILES.items():
    (FOLDER / name).parent.mkdir(exist_ok=True)
    (FOLDER / name).write_text(source, encoding="utf-8")
sys.path.insert(0, str(FOLDER))"""
SPECIAL = str.maketrans({c: f"&#{ord(c)};" for c in "\\`*_{}[]<>&#|$~^@"})


class Label(NamedTuple):
    """Where a label stands and what a reference to it says."""

    text: str  # "Figure 2.3"
    number: str  # "2.3"
    key: str  # the page
    anchor: str


class Book(NamedTuple):
    """What all pages share."""

    numbers: dict  # page key → "2"
    labels: dict  # label → Label
    works: dict  # citation key → (what is written in the sentence, the entry for the list)
    runs: dict  # page key → Run
    href: object  # (from page key, to page key, anchor) → address


class View(NamedTuple):
    """A page that is being rendered, and what of it waits to be put into the HTML."""

    page: object
    book: Book
    slots: list
    formulas: list
    heads: object  # counts the headings of the second level
    names: set  # in the listings so far


# References


def collect_labels(pages, numbers):
    """Return every label of the book, numbered page by page."""
    labels = {}
    for key, number in numbers.items():
        text = f"Section {number}" if number else "the introduction"
        labels["sec-" + key] = Label(text, number, key, "")
    for page in pages:
        counts, own = dict.fromkeys(KINDS, 0), numbers.get(page.key.removeprefix("solutions/"))
        prefix = "S" * page.key.startswith("solutions/") + (f"{own}." if own else "")
        for label, line in labels_of(page):
            kind = label.partition("-")[0]
            counts[kind] += kind != "sec" or label == "sec"
            if label in labels:
                where = f"the label {label} stands already on page {labels[label].key}"
                raise BookError(page.file, line, where)
            if label != "sec":
                number = f"{prefix}{counts[kind]}"
                labels[label] = Label(f"{KINDS[kind]} {number}", number, page.key, label)
    return labels


def labels_of(page):
    """Yield the labels of a page with their lines, and "sec" for every heading that counts."""
    for block in page.blocks:
        if isinstance(block, Cell) and "label" in block.options:
            yield block.options["label"], block.line
        elif isinstance(block, Text) and not block.raw:
            for match in LABEL.finditer(block.text):
                yield match[1] or "sec", block.line + block.text.count("\n", 0, match.start())


def texts(page):
    """Yield the prose and the captions of a page, with their lines."""
    for block in page.blocks:
        if isinstance(block, Text) and not block.raw:
            yield block.text, block.line
        elif isinstance(block, Cell):
            yield block.options.get("caption", ""), block.line


def check(page, book):
    """Refuse what refers to nothing, before anything is run."""
    for text, line in texts(page):
        resolve(resolve_links(text, page, line, book, page.key), page, line, book, lambda *_: "")


def cited(page):
    """Return the keys of the works that a page cites."""
    found = [match for text, _ in texts(page) for match in CITE.findall(text)]
    return set(re.findall(r"@([\w:.-]+)", " ".join(found)))


def resolve(text, page, line, book, link):
    """Replace references and citations; `link(words, page key, anchor)` makes a link."""

    def change(part, offset):
        def find(known, match, key, what):
            if key not in known:
                rows = text.count("\n", 0, offset) + match.string.count("\n", 0, match.start())
                raise BookError(page.file, line + rows, f"there is no {what.format(key)}")
            return known[key]

        def cite(match):
            keys = [key.strip().removeprefix("@") for key in match[1].split(";")]
            what = "work {!r} in docs/references.bib"
            found = [(find(book.works, match, key, what)[0], "ref-" + key) for key in keys]
            return f"({'; '.join(link(words, 'references', anchor) for words, anchor in found)})"

        def refer(match):
            label = find(book.labels, match, match[1], "label {!r}")
            return link(label.text, label.key, label.anchor)

        return REFER.sub(refer, CITE.sub(cite, part))

    return outside_code(change, text)


def resolve_links(text, page, line, book, start):
    """Give links to sources the addresses of their pages, seen from the page `start`."""

    def change(match):
        key = posixpath.normpath(posixpath.join(posixpath.dirname(page.key), match[1]))
        try:
            return f"]({book.href(start, key, match[2] or '')})"
        except KeyError:
            place = line + text.count("\n", 0, match.start())
            raise BookError(page.file, place, f"there is no page {match[1]!r} to link to") from None

    text = LINK.sub(change, text)
    return text if start else text.replace("](#", f"]({book.href(None, page.key, '')}#")


# What is common to the page and the notebooks


def timed_names(page):
    """Return the cells and inline values (by position) that depend on measured times."""
    names, blocks = set(), set()
    for position, block in enumerate(page.blocks):
        timed = isinstance(block, Cell) and block.options.get("timing")
        if isinstance(block, Text) or not (timed or names):
            continue
        for statement in ast.parse(block.source).body:
            read, changed = flow(statement)
            if timed or names & read:
                blocks.add(position)
                names |= changed
            else:
                names -= changed
    return blocks


def flow(statement):
    """Return the names of the page that a statement reads, and those that it changes."""
    whole = symtable(ast.unparse(statement), "page", "exec")
    changed = {symbol.get_name() for symbol in whole.get_symbols() if symbol.is_assigned()}
    if isinstance(statement, ast.For):  # the names of the loop are new in its body
        own = {node.id for node in ast.walk(statement.target) if isinstance(node, ast.Name)}
        first = symtable(ast.unparse(statement.iter), "page", "exec")
        return reads(whole) - own | reads(first), changed | filled(statement)
    again = changed if isinstance(statement, ast.AugAssign) else set()
    return reads(whole) | again, changed | filled(statement)


def reads(table, top=True):
    """Return the names of the page that are read in a scope and in those inside of it."""
    own = [symbol for symbol in table.get_symbols() if symbol.is_referenced()]
    names = {symbol.get_name() for symbol in own if top or symbol.is_global()}
    return names.union(*(reads(child, False) for child in table.get_children()))


def filled(statement):
    """Return the names whose items a statement sets, as `costs[8] = seconds` does."""
    places = [n.value for n in ast.walk(statement) if isinstance(n, ast.Subscript | ast.Attribute)
              and isinstance(n.ctx, ast.Store)]  # fmt: skip
    return {place.id for place in places if isinstance(place, ast.Name)}


def render(page, book, prose, code):
    """Return a page as notebook cells, inline values filled in.

    `prose(text, line)` gives the text of a text cell, `code(cell, outputs, timed)` a list of cells.
    """
    timed, run = timed_names(page), book.runs.get(page.key)
    results, cells, words, line = iter(run.outputs if run else []), [], [], 1
    for position, block in enumerate([*page.blocks, None]):
        if isinstance(block, Inline):
            value = "".join(o["text"] for o in next(results)).translate(SPECIAL)
            if "\n" in value:
                raise BookError(page.file, block.line, "an inline value has more than one line")
            mark = "<span data-timing data-search-exclude>{}</span>" if position in timed else "{}"
            words.append(mark.format(value))
        elif isinstance(block, Text) and not block.raw:
            line = line if words else block.line
            words.append(block.text)
        else:
            cells.append(text_cell(prose("".join(words), line)))
            words = []
            if isinstance(block, Cell):
                cells += code(block, next(results), position in timed)
            elif block:
                cells.append(text_cell(block.text))
    return cells


# The page


def page_markdown(view):
    """Return the Markdown of a page of the site; fill its slots and formulas."""

    def code(cell, outputs, timed):
        listing = listing_slot(view, cell.source)
        if cell.options.get("check"):
            listing = CHECKED.format(listing)
        shown = output_html(view, cell, outputs, timed)
        return [text_cell(listing * cell.options.get("echo", True) + (shown and f"\n{shown}\n"))]

    cells = render(view.page, view.book, partial(site_prose, view), code)
    return "".join(cell["source"] for cell in cells)


def listing_slot(view, source):
    """Return the slot of a listing, and its new names, by which alone the search finds it."""
    view.slots.append(highlight(source, PythonLexer(), LISTING))
    code = re.sub(r'"""[\s\S]*?"""|#.*', "", source)  # docstrings and comments have no names
    new = [name for name in dict.fromkeys(NAME.findall(code)) if name not in view.names]
    view.names.update(new)
    return f"\nbkslot{len(view.slots) - 1:05}z\n" + f"`{' '.join(new)}`\n" * bool(new)


def site_prose(view, text, line):
    """Return prose with links for the site and formulas behind slots, headings numbered."""
    page, book = view.page, view.book

    def link(words, key, anchor):
        address = html.escape(book.href(page.key, key, anchor))
        return f'<a class="book-ref" href="{address}">{words.replace(" ", "&nbsp;", 1)}</a>'

    if page.key.startswith("solutions/"):  # of the other pages, MkDocs does it
        text = resolve_links(text, page, line, book, page.key)
    try:
        text, found = find_maths(resolve(text, page, line, book, link), line)
    except ValueError as error:
        raise BookError(page.file, *error.args) from None
    view.formulas.extend(found)
    text = THEOREM.sub(partial(theorem, book), text)
    return HEAD.sub(partial(heading, view), text) if page.key in book.numbers else text


def heading(view, match):
    """Give a heading of a section its number and its anchor."""
    level, title, anchor = match.groups()
    number = view.book.numbers[view.page.key] if level != "###" else ""
    if level == "##":
        number = f"{number}.{next(view.heads)}" if number else ""
    mark = f'<span class="book-number">{number}</span> ' if number else ""
    return f"{level} {mark}{title} {{#{anchor or slugify(title, '-')}}}"


def theorem(book, match):
    """Number a theorem and give it its anchor."""
    pad, title, label = match.groups()
    words = f'!!! theorem "{book.labels[label].text}. {title}"'
    return f'{pad}{words}\n\n{pad}    <span id="{label}"></span>\n'


def output_html(view, cell, outputs, timed, before=""):
    """Return the slot of what stands `before` and of what a cell gave, or nothing."""
    label, caption = (cell.options.get(name, "") for name in ("label", "caption"))
    words = re.sub(r"^<p>|</p>$", "", markdown.markdown(site_prose(view, caption, cell.line)))
    if label:
        words = f'<span class="book-number">{view.book.labels[label].text}.</span> {words}'
    name, shown = label or f"c{len(view.slots) + 1}", ""
    try:
        for output in outputs:
            shown += show(cell, output, f"{name}-{shown.count('<figure')}", words)
        if label and (drawn := shown.count("<figure")) != 1:
            raise ValueError(f"{label} names one figure or table, but the cell gives {drawn}")
    except ValueError as error:
        raise BookError(view.page.file, cell.line, str(error)) from None
    shown = before + (f"<div data-timing>{shown}</div>" if timed and shown else shown)
    view.slots.append(shown)
    return f"bkslot{len(view.slots) - 1:05}z" if shown else ""


def show(cell, output, prefix, words):
    """Return the HTML of one output; raise ValueError for what cannot be shown."""
    data, label = output.get("data", {}), cell.options.get("label")
    anchor = f' id="{label}"' if label else ""
    figure = f'<figure class="book-{{}}"{anchor}>{{}}{{}}</figure>'
    caption = f"<figcaption>{words}</figcaption>" if words else ""
    if "image/svg+xml" in data:
        if len(cell.options.get("alt", "")) < 20:
            raise ValueError("a figure needs `#| alt:`, a sentence that says what it shows")
        svg = inline_svg(data["image/svg+xml"], prefix=prefix, alt=cell.options["alt"])
        return figure.format("figure", svg, caption)
    if "text/html" in data:
        return figure.format("table", caption, SCROLL.format(data["text/html"]))
    if output["output_type"] == "error":
        message = f"{output['ename']}: {output['evalue']}".removesuffix(": ")
        return PRINTED.format("book-output book-failure", html.escape(message))
    if "text" in output or "text/plain" in data:
        text = (output.get("text") or data["text/plain"]).rstrip("\n")
        return PRINTED.format("book-output", html.escape(text))
    raise ValueError(f"cannot show {', '.join(data)}; draw figures as vectors")


def hide(content, slots):
    """Keep listings, and what stands behind slots and formulas, out of the search."""

    def put(match):
        slots.append(match[0])
        return f"bkslot{len(slots) - 1:05}z"

    content = SHOWN.sub(put, content)
    return SLOT.sub(r"<i data-search-exclude>\g<0></i>", content)


def fill(content, slots):
    """Put what stands behind the slots back, of code only the marks of the colours of book.css."""
    content = PLAIN.sub(r"\1", FILLED.sub(lambda m: slots[int(m[1])], content))
    return re.sub(r"<i data-search-exclude>(kxm\w+)</i>", r"\1", content)


# Notebooks


def site_notebook(view):
    """Return a solutions page as the notebook that mkdocs-jupyter renders."""

    def code(cell, outputs, timed):
        if cell.options.get("echo") is False or cell.options.get("check"):
            listing = highlight(cell.source, PythonLexer(), LISTING)
            listing = CHECKED.format(listing) if cell.options.get("check") else ""
            return [text_cell(f"\n\n{output_html(view, cell, outputs, timed, listing)}\n\n")]
        shown = {"text/html": output_html(view, cell, outputs, timed)}
        data = {"output_type": "display_data", "metadata": {}, "data": shown}
        return [code_cell(cell.source, [data] * bool(shown["text/html"]))]

    return finish(render(view.page, view.book, partial(site_prose, view), code))


def reader_notebook(page, book, modules, closing):
    """Return the notebook that a reader takes along; it needs no file of the book."""

    def link(words, key, anchor):
        own = key in (page.key, "references")
        return words if own else f"[{words}]({book.href(None, key, anchor)})"

    def prose(text, line):
        text = resolve(text, page, line, book, link)
        return portable(resolve_links(text, page, line, book, None), book)

    def code(cell, outputs, timed):
        tags = ["raises-exception"] * ("raises" in cell.options) + ["timing"] * timed
        cells = [code_cell(cell.source, outputs, **({"tags": tags} if tags else {}))]
        if label := cell.options.get("label"):
            caption = resolve(cell.options["caption"], page, cell.line, book, link)
            cells.append(text_cell(f"**{book.labels[label].text}.** {caption}"))
        return cells

    cells = render(page, book, prose, code)
    if modules:
        plain = {k: re.sub(r"^# --8<-- .*\n", "", v, flags=re.M) for k, v in modules.items()}
        files = "".join(f"FILES[{name!r}] = r'''{text}'''\n" for name, text in plain.items())
        hidden = {"tags": ["book-setup"], "jupyter": {"source_hidden": True}}
        cells.insert(0, code_cell(BRING.format(files), **hidden))
    works = "".join(f"- {book.works[key][1]}\n" for key in sorted(cited(page)))
    cells.append(text_cell((f"**Works cited**\n\n{works}\n" if works else "") + closing))
    return finish(cells)


def text_cell(source):
    """Return a text cell, unchecked: nbformat checks the whole notebook when it is written."""
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def code_cell(source, outputs=(), **metadata):
    """Return a code cell, unchecked."""
    return {"cell_type": "code", "metadata": metadata, "source": source, "outputs": list(outputs)}


def finish(cells):
    """Return a notebook: neighbouring text cells joined, with stable ids and counts."""
    joined, count = [], 0
    for cell in cells:
        if joined and cell["cell_type"] == joined[-1]["cell_type"] == "markdown":
            joined[-1]["source"] += "\n" + cell["source"]
        else:
            joined.append(cell)
    joined = [cell for cell in joined if cell["source"].strip()]
    for number, cell in enumerate(joined):
        cell |= {"id": f"cell-{number}", "source": cell["source"].strip("\n")}
        if cell["cell_type"] == "code":
            count += 1
            new = {"execution_count": count}
            shown = [o | new if "execution_count" in o else o for o in cell["outputs"]]
            cell.update(new, outputs=shown)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = {"cells": joined, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return nbformat.from_dict(notebook)


def portable(text, book):
    """Turn Material's Markdown into what every notebook reader knows."""
    text = EQUATION.sub(lambda m: f"\\tag{{{book.labels[m[1]].number}}}\n$$", text)
    text = THEOREM.sub(lambda m: f'{m[1]}!!! theorem "{book.labels[m[3]].text}. {m[2]}"', text)
    text = re.sub(r"<!--.*?-->\n?|</?span[^>]*>", "", text, flags=re.S)
    text = re.sub(r"^(#+ .*?) *\{#[\w-]+\}$|(?<=[])])\{ ?[.:#][^}\n]*\}", r"\1", text, flags=re.M)
    out, folded = [], None  # None outside of a block, else whether it is folded
    for row in text.split("\n"):
        head = re.match(r'(!!!|\?\?\?\+?|===) (?:[\w-]+ ?)*"(.*)"', row)
        if folded is not None and row and not row.startswith("    "):
            out += ["</details>", ""] if folded else [""]
            folded = None
        if head:
            folded = row.startswith("???")
            out += [f"<details><summary>{head[2]}</summary>" if folded else f"> **{head[2]}**"]
        elif folded is False and (row or out[-1] != ">"):
            out.append(f"> {row[4:]}".rstrip())
        else:
            out.append(row[4:] if folded else row)
    return "\n".join([*out, "</details>"] if folded else out)


def script(notebook):
    """Return the cells of a notebook as a plain Python script."""
    plain = nbformat.from_dict(notebook)  # a copy
    for cell in plain.cells:
        if "raises-exception" in cell.metadata.get("tags", []):
            body = indent(cell.source, "    ")
            cell.source = f"try:\n{body}\nexcept Exception as error:\n    print({ERROR})"
    return jupytext.writes(plain, "py:percent")
