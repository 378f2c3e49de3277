"""Render a page that has run: as Markdown for the site, and as a notebook.

What Markdown must not touch (output, drawings, formulas) is put behind a
slot, a word that survives every Markdown reader; `fill` puts it back when
the HTML is there.
"""

import ast
import html
import posixpath
import re
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
FILLED = re.compile(r"(?:<p>)?<i data-search-exclude>(bkslot\d{5}z)</i>(?:</p>)?")
SCROLL = '<div class="book-scroll" tabindex="0" role="group" aria-label="Table">{}</div>'
CHECKED = '<details class="book-check" markdown="1"><summary>checked</summary>\n\n{}\n</details>\n'
PRINTED = '<div class="{}" data-search-exclude><pre tabindex="0"><samp>{}</samp></pre></div>'
ERROR = 'f"{type(error).__name__}: {error}"'
KINDS = {"fig": "Figure", "tbl": "Table", "eq": "Equation", "sec": "Section", "thm": "Theorem"}
SPECIAL = str.maketrans({c: f"&#{ord(c)};" for c in "\\`*_{}[]<>&#|$~^@"})


class Label(NamedTuple):
    """Where a label stands and what a reference to it says."""

    text: str  # "Figure 2.3"
    number: str  # "2.3"
    key: str  # the page
    anchor: str
    line: int


class Book(NamedTuple):
    """What all pages share."""

    numbers: dict  # page key → "2"
    labels: dict  # label → Label
    works: dict  # citation key → what is written in the sentence, "Nadaraya, 1964"
    runs: dict  # page key → Run
    href: object  # (from page key, to page key, anchor) → address


class View(NamedTuple):
    """A page that is being rendered, and what of it waits to be put into the HTML."""

    page: object
    book: Book
    slots: dict
    formulas: list


def collect_labels(pages, numbers):
    """Return every label of the book, numbered page by page."""
    labels = {}
    for page in pages:
        counts = dict.fromkeys(KINDS, 0)
        if page.key in numbers:
            add_label(labels, page, "sec-" + page.key, numbers[page.key] or "introduction", "", 1)
        for label, line in labels_of(page):
            kind = label.partition("-")[0]
            counts[kind] += kind != "sec" or label == "sec"
            if label != "sec":
                add_label(labels, page, label, dotted(numbers, page, counts[kind]), label, line)
    return labels


def labels_of(page):
    """Yield the labels of a page with their lines, and "sec" for every heading that counts."""
    for block in page.blocks:
        if isinstance(block, Cell) and "label" in block.options:
            yield block.options["label"], block.line
        elif isinstance(block, Text) and not block.raw:
            for match in LABEL.finditer(block.text):
                yield match[1] or "sec", block.line + block.text.count("\n", 0, match.start())


def dotted(numbers, page, count):
    """Return the number of the `count`-th thing of a page: 2.3, or S2.3 in its solutions."""
    own = numbers.get(page.key.removeprefix("solutions/"), "")
    prefix = "S" if page.key.startswith("solutions/") else ""
    return f"{prefix}{own}.{count}" if own else f"{prefix}{count}"


def add_label(labels, page, label, number, anchor, line):
    """Add one label; it must be new."""
    if label in labels and (labels[label].anchor or anchor):
        place = f"page {labels[label].key}, line {labels[label].line}"
        raise BookError(page.file, line, f"the label {label} stands already on {place}")
    kind = KINDS[label.partition("-")[0]]
    text = "the introduction" if number == "introduction" else f"{kind} {number}"
    labels[label] = Label(text, number, page.key, anchor, line)


def timed_names(page):
    """Return the cells and inline values (by position) that depend on measured times."""
    names, blocks = set(), set()
    if not any(isinstance(block, Cell) and block.options.get("timing") for block in page.blocks):
        return blocks
    for position, block in enumerate(page.blocks):
        if isinstance(block, Text):
            continue
        found = [n for n in ast.walk(ast.parse(block.source)) if isinstance(n, ast.Name)]
        used = {n.id for n in found if isinstance(n.ctx, ast.Load)}
        if (isinstance(block, Cell) and block.options.get("timing")) or used & names:
            blocks.add(position)
            names |= {n.id for n in found if isinstance(n.ctx, ast.Store)}
    return blocks


def pieces(page, run):
    """Yield the page as (prose, line) and (cell, outputs, timed), inline values filled in."""
    timed, results = timed_names(page), iter(run.outputs if run else [])
    prose, line = [], 1
    for position, block in enumerate(page.blocks):
        if isinstance(block, Inline):
            value = "".join(o["text"] for o in next(results)).translate(SPECIAL)
            if "\n" in value:
                raise BookError(page.file, block.line, "an inline value has more than one line")
            mark = "<span data-timing data-search-exclude>{}</span>" if position in timed else "{}"
            prose.append(mark.format(value))
        elif isinstance(block, Text) and not block.raw:
            line = line if prose else block.line
            prose.append(block.text)
        else:
            yield "".join(prose), line
            prose = []
            if isinstance(block, Cell):
                yield block, next(results), position in timed
            else:
                yield block
    yield "".join(prose), line


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
        def wrong(match, message):
            rows = text.count("\n", 0, offset) + match.string.count("\n", 0, match.start())
            return BookError(page.file, line + rows, message)

        def cite(match):
            keys = [key.strip().removeprefix("@") for key in match[1].split(";")]
            if unknown := [key for key in keys if key not in book.works]:
                raise wrong(match, f"there is no work {unknown[0]!r} in docs/references.bib")
            return f"({'; '.join(link(book.works[k], 'references', 'ref-' + k) for k in keys)})"

        def refer(match):
            if match[1] not in book.labels:
                raise wrong(match, f"there is no label {match[1]!r}")
            label = book.labels[match[1]]
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


class Slots(dict):
    """Slot → HTML, numbered as they come."""

    def put(self, text):
        """Keep some HTML; return the slot that stands for it."""
        name = f"bkslot{len(self):05}z"
        self[name] = text
        return name


def page_markdown(view):
    """Return the Markdown of a page of the site; fill its slots and formulas."""
    out, state = [], {"h2": 0, "cell": 0}
    for piece in pieces(view.page, view.book.runs.get(view.page.key)):
        if isinstance(piece, Text):
            out.append(piece.text)
        elif isinstance(piece[0], str):
            text = THEOREM.sub(lambda m: theorem(m, view.book), site_prose(view, *piece))
            out.append(HEAD.sub(lambda m: heading(m, view, state), text))
        else:
            state["cell"] += 1
            code = f"```python\n{piece[0].source}\n```\n"
            if piece[0].options.get("check"):
                code = CHECKED.format(code)
            shown = output_html(view, *piece, f"c{state['cell']}")
            out.append("" if piece[0].options.get("echo") is False else code)
            out.append(f"\n{view.slots.put(shown)}\n" if shown else "")
    return "".join(out)


def site_prose(view, text, line):
    """Return prose with links for the site and formulas behind slots."""
    page, book = view.page, view.book

    def link(words, key, anchor):
        address = html.escape(book.href(page.key, key, anchor))
        return f'<a class="book-ref" href="{address}">{words.replace(" ", "&nbsp;", 1)}</a>'

    try:
        text, found = find_maths(resolve(text, page, line, book, link), line)
    except ValueError as error:
        raise BookError(page.file, *error.args) from None
    view.formulas.extend(found)
    return text


def heading(match, view, state):
    """Give a heading of a section its number and its anchor."""
    level, title, anchor = match.groups()
    if view.page.key not in view.book.numbers:
        return match[0]
    number = view.book.numbers[view.page.key] if level != "###" else ""
    if level == "##":
        state["h2"] += 1
        number = number and f"{number}.{state['h2']}"
    mark = f'<span class="book-number">{number}</span> ' if number else ""
    return f"{level} {mark}{title} {{#{anchor or slugify(title, '-')}}}"


def theorem(match, book):
    """Number a theorem and give it its anchor."""
    pad, title, label = match.groups()
    words = f'!!! theorem "{book.labels[label].text}. {title}"'
    return f'{pad}{words}\n\n{pad}    <span id="{label}"></span>\n'


def output_html(view, cell, outputs, timed, prefix):
    """Return the HTML of what a cell gave."""
    label, caption = (cell.options.get(name, "") for name in ("label", "caption"))
    words = re.sub(r"^<p>|</p>$", "", markdown.markdown(site_prose(view, caption, cell.line)))
    if label:
        words = f'<span class="book-number">{view.book.labels[label].text}.</span> {words}'
    parts, drawn = [], 0
    for output in outputs:
        data = output.get("data", {})
        if "image/svg+xml" in data:
            svg = drawing(view.page, cell, data["image/svg+xml"], f"{label or prefix}-{drawn}")
            parts.append(figure("figure", label, svg, words))
        elif "text/html" in data:
            parts.append(figure("table", label, SCROLL.format(data["text/html"]), words))
        elif output["output_type"] == "error":
            message = f"{output['ename']}: {output['evalue']}".removesuffix(": ")
            parts.append(PRINTED.format("book-output book-failure", html.escape(message)))
        elif "text" in output or "text/plain" in data:
            text = (output.get("text") or data["text/plain"]).rstrip("\n")
            parts.append(PRINTED.format("book-output", html.escape(text)))
        else:
            message = f"cannot show {', '.join(data)}; draw figures as vectors"
            raise BookError(view.page.file, cell.line, message)
        drawn += parts[-1].startswith("<figure")
    if label and drawn != 1:
        message = f"{label} names one figure or table, but the cell gives {drawn}"
        raise BookError(view.page.file, cell.line, message)
    shown = "".join(parts)
    return f"<div data-timing>{shown}</div>" if timed and shown else shown


def drawing(page, cell, svg, prefix):
    """Return the SVG of a figure as a part of the page."""
    if len(cell.options.get("alt", "")) < 20:
        message = "a figure needs `#| alt:`, a sentence that says what it shows"
        raise BookError(page.file, cell.line, message)
    try:
        return inline_svg(svg, prefix=prefix, alt=cell.options["alt"])
    except ValueError as error:
        raise BookError(page.file, cell.line, str(error)) from None


def figure(kind, label, content, caption):
    """Return a figure or table with its caption."""
    anchor = f' id="{label}"' if label else ""
    caption = f"<figcaption>{caption}</figcaption>" if caption else ""
    first, second = (caption, content) if kind == "table" else (content, caption)
    return f'<figure class="book-{kind}"{anchor}>{first}{second}</figure>'


def hide(content):
    """Keep what stands behind slots and formulas out of the search."""
    return SLOT.sub(r"<i data-search-exclude>\g<0></i>", content)


def fill(content, slots):
    """Put what stands behind the slots back; leave bare formulas."""
    content = FILLED.sub(lambda m: slots[m[1]], content)
    return re.sub(r"<i data-search-exclude>(kxm\w+)</i>", r"\1", content)


# Notebooks


def site_notebook(view):
    """Return a solutions page as the notebook that mkdocs-jupyter renders."""
    cells, count = [], 0
    for piece in pieces(view.page, view.book.runs[view.page.key]):
        if isinstance(piece, Text):
            cells.append(text_cell(piece.text))
        elif isinstance(piece[0], str):
            text = resolve_links(piece[0], view.page, piece[1], view.book, view.page.key)
            cells.append(text_cell(site_prose(view, text, piece[1])))
        else:
            count += 1
            cell, shown = piece[0], output_html(view, *piece, f"c{count}")
            if cell.options.get("echo") is False or cell.options.get("check"):
                code = highlight(cell.source, PythonLexer(), HtmlFormatter(wrapcode=True))
                code = CHECKED.format(code) if cell.options.get("check") else ""
                cells.append(text_cell(f"\n\n{view.slots.put(code + shown)}\n\n"))
                continue
            data = {"output_type": "display_data", "metadata": {}}
            data["data"] = {"text/html": view.slots.put(shown)}
            cells.append(code_cell(cell.source, [data] if shown else []))
    return finish(cells)


def reader_notebook(page, book, modules, closing):
    """Return the notebook that a reader takes along; it needs no file of the book."""

    def link(words, key, anchor):
        own = key in (page.key, "references")
        return words if own else f"[{words}]({book.href(None, key, anchor)})"

    brought = code_cell(bring(modules), tags=["book-setup"], jupyter={"source_hidden": True})
    cells = [brought] if modules else []
    for piece in pieces(page, book.runs[page.key]):
        if isinstance(piece, Text):
            cells.append(text_cell(piece.text))
        elif isinstance(piece[0], str):
            text = resolve(piece[0], page, piece[1], book, link)
            text = resolve_links(text, page, piece[1], book, None)
            cells.append(text_cell(portable(text, book)))
        else:
            cell, outputs, timed = piece
            tags = ["raises-exception"] * ("raises" in cell.options) + ["timing"] * timed
            cells.append(code_cell(cell.source, outputs, **({"tags": tags} if tags else {})))
            if label := cell.options.get("label"):
                caption = resolve(cell.options["caption"], page, cell.line, book, link)
                cells.append(text_cell(f"**{book.labels[label].text}.** {caption}"))
    works = "".join(f"- {closing['works'][key]}\n" for key in sorted(cited(page)))
    cells.append(text_cell((f"**Works cited**\n\n{works}\n" if works else "") + closing["licence"]))
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
            cell["execution_count"] = count
            counted = {"execution_count": count}
            cell["outputs"] = [
                o | counted if "execution_count" in o else o for o in cell["outputs"]
            ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = {"cells": joined, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return nbformat.from_dict(notebook)


def bring(modules):
    """Return the code of the first cell, which brings the book's modules along."""
    plain = {
        name: re.sub(r"^# --8<-- .*\n", "", source, flags=re.M) for name, source in modules.items()
    }
    texts = "".join(f"FILES[{name!r}] = r'''{source}'''\n" for name, source in plain.items())
    return (
        "# The book's own modules, so that this notebook needs nothing but its packages.\n"
        "import sys\nimport tempfile\nfrom pathlib import Path\n\nFILES = {}\n"
        f"{texts}FOLDER = Path(tempfile.mkdtemp())\nfor name, source in FILES.items():\n"
        "    (FOLDER / name).parent.mkdir(exist_ok=True)\n"
        '    (FOLDER / name).write_text(source, encoding="utf-8")\nsys.path.insert(0, str(FOLDER))'
    )


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
    cells = []
    for cell in notebook.cells:
        source = cell.source
        if "raises-exception" in cell.metadata.get("tags", []):
            body = "\n".join("    " + row if row else row for row in source.split("\n"))
            source = f"try:\n{body}\nexcept Exception as error:\n    print({ERROR})"
        cells.append(cell | {"source": source, "outputs": []} if cell.cell_type == "code" else cell)
    return jupytext.writes(nbformat.from_dict(notebook | {"cells": cells}), "py:percent")
