"""Expand a page: from its source text to prose, cells and inline values.

    docs/<key>.md            ```python fences and `{python} …` spans
    docs/solutions/<key>.py  # %% cells, read by jupytext

Every piece knows the file and line it came from, so that whatever goes
wrong later can be told with its place.
"""

import ast
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import jupytext
import yaml

FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<ticks>`{3,}|~{3,})(?P<info>[^`]*)$")
INCLUDE = re.compile(r'^--8<-- "(?P<file>[^":]+)(?::(?P<region>[\w-]+))?"$')
MARKER = re.compile(r"^\s*# --8<-- \[(?P<edge>start|end):(?P<name>[\w-]+)\]\s*$")
SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n[ \t]*\n).)+?)(?<!`)\1(?!`)", re.S)
OPTIONS = {
    "label": str,
    "caption": str,
    "alt": str,
    "echo": bool,
    "raises": str,
    "check": bool,
    "cache": bool,
    "timing": bool,
    "stderr": bool,
    "timeout": (int, float),
}


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
    """An expression whose value stands in a sentence."""

    source: str
    line: int


class Page(NamedTuple):
    """A page or a solutions page, expanded."""

    key: str  # "attention-pooling" or "solutions/attention-pooling"
    file: str  # "docs/attention-pooling.md"
    blocks: list


def read_markdown(text, file, root, line=1):
    """Return the blocks of Markdown `text`, whose first line is `line`."""
    blocks, prose, opened, body = [], [], None, []

    def flush(end):
        blocks.extend(split_inline("".join(prose), end - len(prose), file))
        prose.clear()

    for place, row in enumerate(text.splitlines(), line):
        if opened and row.strip().startswith(opened["ticks"]) and not row.strip().strip(opened["ticks"][0]):
            if opened["info"] == "python":
                blocks.append(make_cell(body, start, file, root))
            else:
                blocks.append(Text("\n".join([opened.string, *body, row, ""]), start, raw=True))
            opened, body = None, []
        elif opened and "```" in row:
            raise BookError(file, place, "a fence inside a fence: document testers would stop here")
        elif opened:
            body.append(row)
        elif match := FENCE.match(row):
            check_fence(match, file, place)
            flush(place)
            opened, start = match, place
        elif "```" in row:
            raise BookError(file, place, "``` inside a line of text, where only some readers see a fence")
        else:
            prose.append(row + "\n")
    if opened:
        raise BookError(file, start, "this fence is never closed")
    flush(line + len(text.splitlines()))
    return blocks


def check_fence(fence, file, line):
    """Refuse a Python fence that some tools would run and others would not."""
    language = re.sub(r"^[\s{.]+", "", fence["info"]).split(" ")[0].strip("}").lower()
    if fence.string == "```python" or not re.match(r"i?py(?!$)", language):
        return
    if fence["indent"] and language == "python":
        raise BookError(file, line, "an indented ```python is not a cell: move it to the left margin, or write ```py")
    raise BookError(file, line, f"write ```python (a cell) or ```py (only shown), not {fence.string.strip()}")


def read_percent(text, file, root):
    """Return the blocks of a percent-format notebook."""
    rows, blocks, at = text.splitlines(), [], 0
    starts = [i for i, row in enumerate(rows) if row.startswith("# %%")]
    cells = [c for c in jupytext.reads(text, "py:percent").cells if c.cell_type != "raw"]
    if len(cells) != len(starts):
        raise BookError(file, starts[0] + 1 if starts else 1, "code or text stands before the first # %%")
    for cell, at in zip(cells, starts, strict=True):
        line = at + 2
        while line <= len(rows) and not rows[line - 1].strip():
            line += 1
        if cell.cell_type == "markdown":
            found = read_markdown(cell.source + "\n", file, root, line)
            if code := next((b for b in found if isinstance(b, Cell)), None):
                raise BookError(file, code.line, "code in a text cell: give it a # %% cell")
            blocks += found
        else:
            blocks.append(make_cell(cell.source.split("\n"), line - 1, file, root))
    return blocks


def make_cell(body, line, file, root):
    """Return the cell with lines `body` below the fence at `line`."""
    count = next((i for i, row in enumerate(body) if not row.startswith("#|")), len(body))
    options = read_options(body[:count], file, line)
    source, origin = [], []
    for number, row in enumerate(body[count:], line + count + 1):
        if match := INCLUDE.match(row):
            part, start = region(root, match["file"], match["region"], file, number)
            source += part
            origin += [(match["file"], start + i) for i in range(len(part))]
        elif row.startswith("#|") or "--8<--" in row:
            raise BookError(file, number, f"cannot read {row.strip()!r}: options come first, includes stand alone")
        else:
            source.append(row)
            origin.append((file, number))
    if not any(row.strip() for row in source):
        raise BookError(file, line, "this cell is empty")
    if found := next((i for i, row in enumerate(source) if "```" in row), None):
        raise BookError(*origin[found], "``` inside code: document testers would end the cell here")
    return Cell("\n".join(source).rstrip(), line, origin, options)


def read_options(rows, file, line):
    """Return the options of a cell, checked."""
    try:
        options = yaml.safe_load("\n".join(row[2:].removeprefix(" ") for row in rows)) or {}
    except yaml.YAMLError as error:
        row = error.problem_mark.line if getattr(error, "problem_mark", None) else 0
        raise BookError(file, line + 1 + row, f"cannot read this option ({error.problem}); quote its value") from None
    if not isinstance(options, dict):
        raise BookError(file, line + 1, "options are written #| name: value")
    for name, value in options.items():
        if name not in OPTIONS:
            raise BookError(file, line + 1, f"there is no option {name!r}; there are {', '.join(OPTIONS)}")
        if not isinstance(value, OPTIONS[name]):
            raise BookError(file, line + 1, f"the option {name} cannot be {value!r}")
    label = options.get("label", "fig-")
    if not re.fullmatch(r"(fig|tbl)-[a-z0-9-]*", label):
        raise BookError(file, line + 1, f"a label starts with fig- or tbl- and has small letters: {label!r}")
    if "label" in options and "caption" not in options:
        raise BookError(file, line + 1, f"{label} has no caption")
    return options


def region(root, name, wanted, file, line):
    """Return the lines of a named region and the line where they start."""
    path = (Path(root) / name).resolve()
    if not path.is_relative_to(Path(root).resolve()) or not path.is_file():
        raise BookError(file, line, f"there is no file {name}")
    rows = path.read_text(encoding="utf-8").splitlines()
    if wanted:
        edges = [(i, m["edge"]) for i, row in enumerate(rows) if (m := MARKER.match(row)) and m["name"] == wanted]
        if [edge for _, edge in edges] != ["start", "end"]:
            raise BookError(file, line, f"{name} has no region {wanted!r} that starts once and ends once")
        first, last = edges[0][0] + 1, edges[1][0]
    else:
        first, last = 0, len(rows)
    while first < last and not rows[first].strip():
        first += 1
    while last > first and not rows[last - 1].strip():
        last -= 1
    if first == last or any(MARKER.match(row) for row in rows[first:last]):
        raise BookError(file, line, f"the region {wanted!r} of {name} is empty or holds another region")
    return textwrap.dedent("\n".join(rows[first:last])).split("\n"), first + 1


def split_inline(prose, line, file):
    """Return `prose` as text and inline expressions, in order."""
    blocks, last = [], 0
    for match in SPAN.finditer(prose):
        if match[1] != "`" or not match[2].startswith("{python} "):
            continue
        source = match[2].removeprefix("{python} ").strip()
        place = line + prose.count("\n", 0, match.start())
        try:
            ast.parse(source, mode="eval")
        except SyntaxError as error:
            raise BookError(file, place, f"{type(error).__name__}: {error.msg} in {match[0]}") from None
        blocks.append(Text(prose[last : match.start()], line + prose.count("\n", 0, last)))
        blocks.append(Inline(source, place))
        last = match.end()
    blocks.append(Text(prose[last:], line + prose.count("\n", 0, last)))
    return blocks


def outside_code(change, prose):
    """Apply `change` (text, offset → text) to all of `prose` but code spans."""
    parts, last = [], 0
    for match in SPAN.finditer(prose):
        parts += [change(prose[last : match.start()], last), match[0]]
        last = match.end()
    return "".join([*parts, change(prose[last:], last)])
