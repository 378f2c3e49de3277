"""Render a page that has run: as Markdown for the site, and as a notebook.

What Markdown must not touch (output, drawings, formulas) is put behind a
slot, a word that survives every Markdown reader; `fill` puts it back when
the HTML is there.
"""

import ast
import html
import re
from typing import NamedTuple

import jupytext
import markdown
import nbformat
from markdown.extensions.toc import slugify
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from hooks.expand import BookError, Cell, Inline, Text, outside_code
from hooks.figures import inline_svg
from hooks.maths import find_maths

CITE = re.compile(r"\[(@[\w:.-]+(?:; ?@[\w:.-]+)*)\]")
REFER = re.compile(r"(?<![\w@/.\\])@([a-z]{2,4}-[a-z0-9-]*[a-z0-9])")
HEAD = re.compile(r"^(##?) (.+?)(?: \{#([\w-]+)\})?$", re.M)
THEOREM = re.compile(r'^( *)!!! theorem "(.*)" \{#(thm-[\w-]+)\}$', re.M)
EQUATION = re.compile(r"\$\$[ \t]*\{#(eq-[\w-]+)\}")
SLOT = re.compile(r"(?:<p>)?(bkslot\d{5}z)(?:</p>)?")
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


def collect_labels(pages, numbers):
    """Return every label of the book, numbered page by page."""
    labels = {}
    for page in pages:
        counts = dict.fromkeys(KINDS, 0)
        if page.key in numbers:
            add_label(labels, page, "sec-" + page.key, numbers[page.key] or "introduction", "", 1)
        for block in page.blocks:
            if isinstance(block, Cell) and "label" in block.options:
                found = [(block.options["label"], block.line)]
            elif isinstance(block, Text) and not block.raw:
                found = [(m[1], block.line + block.text.count("\n", 0, m.start())) for m in EQUATION.finditer(block.text)]
                found += [(m[3], block.line + block.text.count("\n", 0, m.start())) for m in THEOREM.finditer(block.text)]
                for m in HEAD.finditer(block.text):
                    counts["sec"] += m[1] == "##"
                    if m[3] and m[3].startswith("sec-"):
                        number = dotted(numbers, page, counts["sec"])
                        add_label(labels, page, m[3], number, m[3], block.line + block.text.count("\n", 0, m.start()))
            else:
                continue
            for label, line in found:
                kind = label.partition("-")[0]
                counts[kind] += 1
                add_label(labels, page, label, dotted(numbers, page, counts[kind]), label, line)
    return labels


def dotted(numbers, page, count):
    """Return the number of the `count`-th thing of a page: 2.3, or S2.3 in its solutions."""
    own = numbers.get(page.key.removeprefix("solutions/"), "")
    prefix = "S" if page.key.startswith("solutions/") else ""
    return f"{prefix}{own}.{count}" if own else f"{prefix}{count}"


def add_label(labels, page, label, number, anchor, line):
    """Add one label; it must be new."""
    if label in labels and (labels[label].anchor or anchor):
        other = labels[label]
        raise BookError(page.file, line, f"the label {label} stands already on page {other.key}, line {other.line}")
    kind = KINDS[label.partition("-")[0]]
    text = "the introduction" if number == "introduction" else f"{kind} {number}"
    labels[label] = Label(text, number, page.key, anchor, line)


def timed_names(page):
    """Return the cells and inline values (by position) that depend on measured times."""
    names, blocks = set(), set()
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


def resolve(text, page, line, book, link):
    """Replace references and citations; `link` makes (text, label or None, citation key) a link."""

    def change(part, offset):
        def place(match):
            return page.file, line + text.count("\n", 0, offset + match.start())

        def cite(match):
            keys = [key.strip().removeprefix("@") for key in match[1].split(";")]
            if unknown := [key for key in keys if key not in book.works]:
                raise BookError(*place(match), f"there is no work {unknown[0]!r} in docs/references.bib")
            return "(" + "; ".join(link(book.works[key], "references", "ref-" + key) for key in keys) + ")"

        def refer(match):
            label = book.labels.get(match[1])
            if not label:
                raise BookError(*place(match), f"there is no label {match[1]!r}")
            return link(label.text, label.key, label.anchor)

        return REFER.sub(refer, CITE.sub(cite, part))

    return outside_code(change, text)


class Slots(dict):
    """Slot → HTML, numbered as they come."""

    def put(self, text):
        """Keep some HTML; return the slot that stands for it."""
        name = f"bkslot{len(self):05}z"
        self[name] = text
        return name


def page_markdown(page, book, slots, formulas):
    """Return the Markdown of a page of the site; fill `slots` and `formulas`."""
    out, state = [], {"h2": 0, "cell": 0}
    for piece in pieces(page, book.runs.get(page.key)):
        if isinstance(piece, Text):
            out.append(piece.text)
        elif isinstance(piece[0], str):
            text = site_prose(piece[0], page, piece[1], book, formulas)
            text = THEOREM.sub(lambda m: theorem(m, book), text)
            out.append(HEAD.sub(lambda m: heading(m, page, book, state), text) if page.key in book.numbers else text)
        else:
            cell, outputs, timed = piece
            state["cell"] += 1
            code = f"```python\n{cell.source}\n```\n"
            if cell.options.get("check"):
                code = f'<details class="book-check" markdown="1"><summary>checked</summary>\n\n{code}\n</details>\n'
            out.append("" if cell.options.get("echo") is False else code)
            shown = output_html(page, cell, outputs, timed, book, formulas, f"c{state['cell']}")
            out.append(f"\n{slots.put(shown)}\n" if shown else "")
    return "".join(out)


def site_prose(text, page, line, book, formulas):
    """Return prose with links for the site and formulas behind slots."""

    def link(words, key, anchor):
        address = html.escape(book.href(page.key, key, anchor))
        return f'<a class="book-ref" href="{address}">{words.replace(" ", "&nbsp;", 1)}</a>'

    try:
        text, found = find_maths(resolve(text, page, line, book, link), line)
    except ValueError as error:
        raise BookError(page.file, *error.args) from None
    formulas += found
    return text


def cited(page):
    """Return the keys of the works that a page cites."""
    texts = [b.text if isinstance(b, Text) else getattr(b, "options", {}).get("caption", "") for b in page.blocks]
    return set(re.findall(r"@([\w:.-]+)", " ".join(CITE.findall(" ".join(texts)))))


def heading(match, page, book, state):
    """Give a heading its number and its anchor."""
    level, title, anchor = match.groups()
    number = book.numbers[page.key]
    if level == "##":
        state["h2"] += 1
        number = number and f"{number}.{state['h2']}"
    mark = f'<span class="book-number">{number}</span> ' if number else ""
    return f"{level} {mark}{title} {{#{anchor or slugify(title, '-')}}}"


def theorem(match, book):
    """Number a theorem and give it its anchor."""
    pad, title, label = match.groups()
    return f'{pad}!!! theorem "{book.labels[label].text}. {title}"\n\n{pad}    <span id="{label}"></span>\n'


def inline_markdown(text):
    """Return the HTML of a caption."""
    return re.sub(r"^<p>|</p>$", "", markdown.markdown(text))


def output_html(page, cell, outputs, timed, book, formulas, prefix):
    """Return the HTML of what a cell gave."""
    options, parts = cell.options, []
    label, caption = options.get("label", ""), options.get("caption", "")
    words = inline_markdown(site_prose(caption, page, cell.line, book, formulas)) if caption else ""
    if label:
        words = f'<span class="book-number">{book.labels[label].text}.</span> {words}'
    for output in outputs:
        data = output.get("data", {})
        if "image/svg+xml" in data:
            if len(options.get("alt", "")) < 20:
                raise BookError(page.file, cell.line, "a figure needs `#| alt:`, a sentence that says what it shows")
            try:
                drawing = inline_svg(data["image/svg+xml"], prefix=label or prefix, alt=options["alt"])
            except ValueError as error:
                raise BookError(page.file, cell.line, str(error)) from None
            parts.append(figure("figure", label, drawing, words))
        elif "text/html" in data:
            scroll = f'<div class="book-scroll" tabindex="0" role="group" aria-label="Table">{data["text/html"]}</div>'
            parts.append(figure("table", label, scroll, words))
        elif output["output_type"] == "error":
            text = f"{output['ename']}: {output['evalue']}"
            parts.append(printed(text, "book-output book-failure"))
        elif "text" in output or "text/plain" in data:
            parts.append(printed((output.get("text") or data["text/plain"]).rstrip("\n"), "book-output"))
        else:
            raise BookError(page.file, cell.line, f"cannot show {', '.join(data)}; draw figures as vectors")
    if label and not any(f'id="{label}"' in part for part in parts):
        raise BookError(page.file, cell.line, f"{label} is there, but the cell gives no figure or table")
    shown = "".join(parts)
    return f"<div data-timing>{shown}</div>" if timed and shown else shown


def figure(kind, label, content, caption):
    """Return a figure or table with its caption."""
    anchor = f' id="{label}"' if label else ""
    caption = f"<figcaption>{caption}</figcaption>" if caption else ""
    first, second = (caption, content) if kind == "table" else (content, caption)
    return f'<figure class="book-{kind}"{anchor}>{first}{second}</figure>'


def printed(text, style):
    """Return printed text as HTML."""
    return f'<div class="{style}" data-search-exclude><pre tabindex="0"><code>{html.escape(text)}</code></pre></div>'


def fill(content, slots):
    """Put what stands behind the slots back, also slots within slots."""
    while SLOT.search(content):
        content = SLOT.sub(lambda m: slots[m[1]], content)
    return content


# Notebooks


def site_notebook(page, book, slots, formulas):
    """Return a solutions page as the notebook that mkdocs-jupyter renders."""
    cells, count = [], 0
    for piece in pieces(page, book.runs[page.key]):
        if isinstance(piece, Text):
            cells.append(new_markdown_cell(piece.text))
        elif isinstance(piece[0], str):
            cells.append(new_markdown_cell(site_prose(piece[0], page, piece[1], book, formulas)))
        else:
            cell, outputs, timed = piece
            count += 1
            shown = output_html(page, cell, outputs, timed, book, formulas, f"c{count}")
            data = {"output_type": "display_data", "metadata": {}, "data": {"text/html": slots.put(shown)}}
            cells.append(new_code_cell(cell.source, outputs=[nbformat.from_dict(data)] if shown else []))
    return finish(merged(cells))


def reader_notebook(page, book, modules, closing):
    """Return the notebook that a reader takes along; it needs no file of the book."""

    def link(words, key, anchor):
        return words if key in (page.key, "references") else f"[{words}]({book.href(None, key, anchor)})"

    cells = []
    if modules:
        cells.append(new_code_cell(bring(modules), metadata={"tags": ["book-setup"], "jupyter": {"source_hidden": True}}))
    for piece in pieces(page, book.runs[page.key]):
        if isinstance(piece, Text):
            cells.append(new_markdown_cell(piece.text))
        elif isinstance(piece[0], str):
            text = EQUATION.sub(lambda m: f"\\tag{{{book.labels[m[1]].number}}}\n$$", piece[0])
            cells.append(new_markdown_cell(portable(resolve(text, page, piece[1], book, link), book)))
        else:
            cell, outputs, timed = piece
            tags = ["raises-exception"] * ("raises" in cell.options) + ["timing"] * timed
            outputs = [nbformat.from_dict(output) for output in outputs]
            cells.append(new_code_cell(cell.source, outputs=outputs, metadata={"tags": tags} if tags else {}))
            if label := cell.options.get("label"):
                caption = resolve(cell.options["caption"], page, cell.line, book, link)
                cells.append(new_markdown_cell(f"**{book.labels[label].text}.** {caption}"))
    works = "".join(f"- {closing['works'][key]}\n" for key in sorted(cited(page)))
    cells.append(new_markdown_cell((f"**Works cited**\n\n{works}\n" if works else "") + closing["licence"]))
    return finish(merged(cells))


def merged(cells):
    """Join neighbouring text cells; drop empty ones."""
    out = []
    for cell in cells:
        if cell.cell_type == "markdown" and out and out[-1].cell_type == "markdown":
            out[-1].source += "\n" + cell.source
        else:
            out.append(cell)
    for cell in out:
        cell.source = cell.source.strip("\n")
    return [cell for cell in out if cell.source]


def finish(cells):
    """Return a notebook with stable ids and counts."""
    count = 0
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = count
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def bring(modules):
    """Return the code of the first cell, which brings the book's modules along."""
    texts = "".join(f"FILES[{name!r}] = r'''{source}'''\n" for name, source in modules.items())
    return (
        "# The book's own modules, so that this notebook needs nothing but its packages.\n"
        "import sys\nimport tempfile\nfrom pathlib import Path\n\nFILES = {}\n"
        f"{texts}FOLDER = Path(tempfile.mkdtemp())\nfor name, source in FILES.items():\n"
        "    (FOLDER / name).parent.mkdir(exist_ok=True)\n"
        '    (FOLDER / name).write_text(source, encoding="utf-8")\nsys.path.insert(0, str(FOLDER))'
    )


def portable(text, book):
    """Turn Material's Markdown into what every notebook reader knows."""
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.S)
    text = re.sub(r"^(#+ .*?) *\{#[\w-]+\}$", r"\1", text, flags=re.M)
    text = re.sub(r"</?span[^>]*>", "", text)
    text = re.sub(r"\[([^\]]+)\]\((?:\.\./)?([\w/-]+)\.(?:md|ipynb)(?:#([\w-]+))?\)", lambda m: (
        f"[{m[1]}]({book.href(None, m[2], m[3] or '')})"), text)
    out, depth, folded = [], None, False
    for row in [*text.split("\n"), "end"]:
        head = re.match(r'^(!!!|\?\?\?\+?|===) (?:[\w-]+ ?)*"(.*)"', row)
        if depth and row and not row.startswith("    "):
            out.append("</details>\n" if folded else "")
            depth = None
        if head:
            depth, folded = True, row.startswith("???")
            out.append(f"<details><summary>{head[2]}</summary>\n" if folded else f"> **{head[2]}**\n>")
        elif depth:
            out.append(row[4:] if folded else f"> {row[4:]}".rstrip())
        else:
            out.append(row)
    return "\n".join(out[:-1])


def script(notebook):
    """Return the cells of a notebook as a plain Python script."""
    copy = nbformat.from_dict(notebook)
    cells = []
    for cell in copy.cells:
        source = cell.source
        if "raises-exception" in cell.metadata.get("tags", []):
            body = "\n".join("    " + row if row else row for row in source.split("\n"))
            source = f'try:\n{body}\nexcept Exception as error:\n    print(f"{{type(error).__name__}}: {{error}}")'
        cells.append(new_code_cell(source) if cell.cell_type == "code" else new_markdown_cell(source))
    return jupytext.writes(new_notebook(cells=cells), "py:percent")
