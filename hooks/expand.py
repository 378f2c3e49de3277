"""Expand a page: from its source to prose, cells and inline values, each with its place.

docs/<key>.md            ```python fences and `{python} …` spans
docs/solutions/<key>.py  # %% cells, read by jupytext
"""

import os
import re
import warnings
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import jupytext
import yaml

FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})([^`]*)")
NEARLY = re.compile(r"[\s{.]*i?py\w", re.I)  # what some tools run and others do not
INCLUDE = re.compile(r'--8<-- "([^":]+)(?::([\w-]+))?"')
MARKER = re.compile(r"\s*# --8<-- \[(start|end):([\w-]+)\]\s*")
SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n[ \t]*\n).)+?)(?<!`)\1(?!`)", re.S)
LABEL = re.compile(r"(fig|tbl)-[a-z0-9-]*[a-z0-9]")
OPTIONS = dict.fromkeys(("label", "caption", "alt", "raises"), str)
OPTIONS |= dict.fromkeys(("echo", "check", "cache", "timing", "stderr"), bool) | {"timeout": int}


class BookError(Exception):
    """Something is wrong at a place; the message starts with `file:line:`."""

    def __init__(self, file, line, message, detail=""):
        super().__init__(f"{file}:{line}: {message}" + (f"\n\n{detail}" if detail else ""))
        self.file, self.line, self.message = file, line, message


class Text(NamedTuple):
    """A stretch of Markdown; `raw` if it is a fence that is only shown."""

    text: str
    line: int
    raw: bool = False


class Cell(NamedTuple):
    """Code to run; `origin` has the file and line of each of its lines."""

    source: str
    line: int
    origin: list
    options: dict


class Inline(NamedTuple):
    """An expression whose value stands in a sentence: a cell without options."""

    source: str
    line: int
    origin: list
    options: dict


class Page(NamedTuple):
    """A page or a solutions page, expanded."""

    key: str  # "attention-pooling" or "solutions/attention-pooling"
    file: str  # "docs/attention-pooling.md"
    blocks: list


def read_text(path, name):
    """Return the text of a file."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise BookError(name, line, f"this is not UTF-8: {error}") from None


def read_markdown(text, file, root, line=1):
    """Return the blocks of Markdown `text`, whose first line is `line`."""
    rows, blocks, prose, at = text.removesuffix("\n").split("\n"), [], [], 0
    while at < len(rows):
        row, place, fence = rows[at], line + at, FENCE.fullmatch(rows[at])
        at += 1
        if not fence:
            if "```" in row or "--8<--" in row:
                raise BookError(file, place, "fences and includes stand on lines of their own")
            prose.append(row + "\n")
            continue
        if row != "```python" and NEARLY.match(fence[3]):
            right = "```python at the left margin (a cell) or ```py (only shown)"
            raise BookError(file, place, f"write {right}, not {row.strip()}")
        end, closing = fence[1] + fence[2], at
        while closing < len(rows) and rows[closing].rstrip() != end and "```" not in rows[closing]:
            closing += 1
        if closing == len(rows):
            raise BookError(file, place, "this fence is never closed")
        if rows[closing].rstrip() != end:
            problem = f"a fence inside that of line {place}, unless that one is not closed"
            raise BookError(file, line + closing, problem)
        blocks += split_inline("".join(prose), place - len(prose), file)
        if row == "```python":
            blocks.append(make_cell(rows[at:closing], place, file, root))
        else:
            body, _ = include(rows[at:closing], place + 1, file, root)
            blocks.append(Text("\n".join([row, *body, end, ""]), place, raw=True))
        prose, at = [], closing + 1
    return blocks + split_inline("".join(prose), line + at - len(prose), file)


def percent_cells(text):
    """Return the cells of a percent-format notebook: for each, its type and its source."""
    cells = jupytext.reads(text, "py:percent").cells
    return [(cell.cell_type, cell.source) for cell in cells if cell.cell_type != "raw"]


def read_percent(text, file, root, cells=None):
    """Return the blocks of a percent-format notebook; its `cells` may be known already."""
    rows, blocks, cells = text.split("\n"), [], cells or percent_cells(text)
    starts = [place for place, row in enumerate(rows, 1) if row.startswith("# %%")]
    if len(cells) != len(starts):
        problem = "all stands below # %% (code) or # %% [markdown] lines, written so"
        raise BookError(file, 1, problem)
    for (kind, source), start in zip(cells, starts, strict=True):
        blank = ("",) if kind == "code" else ("", "#", '"""')
        skipped = (i for i, row in enumerate(rows[start:]) if row.strip() not in blank)
        place, own = start + next(skipped, 0), source.lstrip("\n")
        if kind == "code":
            blocks.append(make_cell(own.split("\n"), place, file, root))
            continue
        for block in read_markdown(own, file, root, place + 1):
            if isinstance(block, Cell):
                raise BookError(file, block.line, "code in a text cell: give it a # %% cell")
            blocks.append(block)
    return blocks


def make_cell(rows, line, file, root):
    """Return the cell with these `rows` below `line`."""
    count = next((i for i, row in enumerate(rows) if not row.startswith("#|")), len(rows))
    options = read_options(rows[:count], line + 1, file)
    source, origin = include(rows[count:], line + 1 + count, file, root)
    if not "".join(source).strip():
        raise BookError(file, line, "this cell is empty")
    for row, place in zip(source, origin, strict=True):
        if "```" in row or row.startswith("#|"):
            raise BookError(*place, "options come first in a cell, and a fence ends it")
    check_python("\n".join(source), origin, "exec")
    return Cell("\n".join(source).rstrip(), line, origin, options)


def read_options(rows, line, file):
    """Return the options of a cell, of which the first stands at `line`."""
    options, parts = {}, []
    for place, row in enumerate(rows, line):
        if row[2:4].strip() or not parts:
            parts.append((place, row[2:]))
        else:  # an indented line goes on with the value
            parts[-1] = parts[-1][0], parts[-1][1] + "\n" + row[2:]
    for place, text in parts:
        try:
            ((name, value),) = yaml.safe_load(text).items()
        except (yaml.YAMLError, AttributeError, ValueError):
            problem = f"write `#| name: value`, quoted where needed, not {text.strip()!r}"
            raise BookError(file, place, problem) from None
        kind, problem = OPTIONS.get(name), None
        if not kind or name in options:
            problem = f"the options are {', '.join(OPTIONS)}, each once: {name!r}"
        elif type(value) is not kind or (kind is not bool and value <= kind()):
            problem = f"the option {name} cannot be {value!r}"
        elif kind is str and (" #" in text and " #" not in value or "{python}" in value):
            problem = f"quote {name}: # starts a comment; {{python}} cannot stand in it"
        elif name == "label" and not LABEL.fullmatch(value):
            problem = f"a label is fig- or tbl- and small letters, not {value!r}"
        if problem:
            raise BookError(file, place, problem)
        options[name] = value
    if "label" in options and "caption" not in options:
        raise BookError(file, line, f"{options['label']} has no caption")
    return options


def check_python(source, origin, mode):
    """Refuse what is not plain Python, as a notebook's % and ! are, and what Python warns of."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compile(source, "cell", mode)
    except (SyntaxError, ValueError) as error:  # the second for a zero byte
        place = origin[min(getattr(error, "lineno", 0) or 1, len(origin)) - 1]
        message = f"{type(error).__name__}: {getattr(error, 'msg', error)}"
        raise BookError(*place, message, source) from None


def include(rows, line, file, root):
    """Return `rows` with regions in place of includes, and the place of each: (file, line)."""
    source, origin = [], []
    for place, row in enumerate(rows, line):
        part, name, start = [row], file, place
        if match := INCLUDE.fullmatch(row):
            name = match[1]
            part, start = region(root, name, match[2], file, place)
        elif "--8<--" in row:
            raise BookError(file, place, 'an include is written --8<-- "file:region", alone')
        source += part
        origin += [(name, start + i) for i in range(len(part))]
    return source, origin


def region(root, name, wanted, file, line):
    """Return the lines of a file, or of a named region of it, and the line where they start."""
    path = Path(os.path.abspath(root / name))
    if not path.is_relative_to(os.path.abspath(root)) or not path.is_file():
        raise BookError(file, line, f"there is no file {name}")
    rows = read_text(path, name).split("\n")
    first, last = 0, len(rows)
    if wanted:
        marks = [(i, mark) for i, row in enumerate(rows, 1) if (mark := MARKER.fullmatch(row))]
        edges = [(i, mark[1]) for i, mark in marks if mark[2] == wanted]
        if [edge for _, edge in edges] != ["start", "end"]:
            problem = f"{name} has no region {wanted!r} that starts once and ends once"
            raise BookError(file, line, problem)
        first, last = edges[0][0], edges[1][0] - 1
    while last > first and not rows[last - 1].strip():  # ruff puts blank lines before a mark
        last -= 1
    if any(MARKER.fullmatch(row) for row in rows[first:last]) or not "".join(rows[first:last]):
        raise BookError(file, line, f"this part of {name} is empty or holds another region")
    return rows[first:last], first + 1


def split_inline(prose, line, file):
    """Return `prose` as text and inline expressions, in order."""
    blocks, last = [], 0
    for match in SPAN.finditer(prose):
        if match[1] == "`" and match[2].startswith("{python}"):
            source = " ".join(match[2].removeprefix("{python}").split("\n")).strip()
            place = line + prose.count("\n", 0, match.start())
            check_python(source, [(file, place)], "eval")
            blocks.append(Text(prose[last : match.start()], line + prose.count("\n", 0, last)))
            blocks.append(Inline(source, place, [(file, place)], {}))
            last = match.end()
    return [*blocks, Text(prose[last:], line + prose.count("\n", 0, last))]


def outside_code(change, prose):
    """Apply `change` (text, offset → text) to all of `prose` but code spans."""
    ends = [0, *(place for match in SPAN.finditer(prose) for place in match.span()), len(prose)]
    parts = [(prose[start:end], start) for start, end in pairwise(ends)]  # every other one is code
    return "".join(text if i % 2 else change(text, at) for i, (text, at) in enumerate(parts))
