"""What no author writes: works cited, the reference of the package, fonts, third-party parts."""

import ast
import hashlib
import html
import json
import os
import re
from importlib import metadata
from pathlib import Path
from textwrap import dedent, indent

from hooks.expand import BookError

# What of each Python package reaches the reader. Of npm, everything is listed.
SHIPPED = {
    "mkdocs-material": "the theme: templates, styles, icons, scripts (with lunr for the search)",
    "mkdocs": "the builder: site map and search index",
    "mkdocs-jupyter": "the first version of the solutions pages",
    "nbconvert": "markup of the solutions pages",
    "pygments": "markup of highlighted code",
    "scikit-learn": "the handwritten digits of section 2",
}
PAGE = """---\nsearch: {{exclude: true}}\n---\n# Third-party parts
\nWhat this site ships or shows that others have made, as this build found it installed.
\n| part | version | licence | what it is here |\n|---|---|---|---|\n{rows}
The digits are the test set of *Optical Recognition of Handwritten Digits* by E. Alpaydin and
C. Kaynak (UCI Machine Learning Repository, 1998,
[doi:10.24432/C50P49](https://doi.org/10.24432/C50P49)), under
[CC BY 4.0](https://creativecommons.org/licenses/by/4.0/). The garments of section 8 are those of
Fashion-MNIST (copyright 2017 Zalando SE), under the MIT licence. The strings of section 7 are
LibreOffice's, under the [MPL 2.0](https://www.mozilla.org/MPL/2.0/).\n\n## Notices\n\n{notices}"""
NOTICE = re.compile(r"(licen[cs]e|copying|notice)[\w.-]*", re.IGNORECASE)
COMMENT = re.compile(r"/\*!.*?\*/", re.DOTALL)  # what a minifier keeps: the notices

# Of npm, only letters that the book shows: whole, the fonts of a page would weigh 150 kB.
TEXT_FONTS = [
    "@fontsource/literata/files/literata-latin-400-normal.woff2",
    "@fontsource/literata/files/literata-latin-400-italic.woff2",
    "@fontsource/literata/files/literata-latin-600-normal.woff2",
    "@fontsource/jetbrains-mono/files/jetbrains-mono-latin-400-normal.woff2",
]
# Fonts that only some classes of KaTeX ask for; any other font may be asked for all the rest.
FACES = {
    "KaTeX_Math-Italic": r'[^"]*\bmathnormal\b',
    "KaTeX_Math-BoldItalic": r'[^"]*\bboldsymbol\b',
    "KaTeX_Main-Bold": r'[^"]*\b(?:math|text)bf\b',
    "KaTeX_AMS-Regular": r'[^"]*\b(?:mathbb|amsrm)\b',
}
OLD_FORMATS = re.compile(r',url\([^)]*\) ?format\("(?:woff|truetype)"\)')


def read_works(text):
    """Return {key: (words for a sentence, entry for the list)} of docs/references.bib."""
    from pybtex import errors  # a build that has read this text before does not need pybtex
    from pybtex.backends.html import Backend
    from pybtex.database import parse_string
    from pybtex.style.formatting.unsrt import Style

    errors.set_strict_mode(True)
    key, works = None, {}
    try:
        for key, entry in parse_string(text, "bibtex").entries.items():
            listed = next(Style().format_entries([entry])).text.render(Backend())
            listed = re.sub(r"</?span[^>]*>", "", listed)  # around what keeps its capitals
            works[key] = (in_sentence(entry), " ".join(listed.split()))
    except Exception as error:
        entry = re.search(rf"{{\s*{key or str(error).split()[-1]}\s*,", text)
        line = text.count("\n", 0, entry.start() if entry else 0) + 1
        message = f"{type(error).__name__}: {error}" + (f" in {key}" if key else "")
        place = getattr(error, "lineno", None) or line
        raise BookError("docs/references.bib", place, message) from None
    return works


def in_sentence(entry):
    """Return the authors and the year: Hu & Sun, 2018."""
    from pybtex.backends.plaintext import Backend
    from pybtex.richtext import Text

    names = [" ".join(p.prelast_names + p.last_names) for p in entry.persons["author"]]
    names = [Text.from_latex(name).render(Backend()) for name in names]
    authors = f"{names[0]} et al." if len(names) > 2 else " & ".join(names)
    return f"{authors}, {entry.fields['year']}"


def list_names(source):
    """Return the public names of a module as Markdown: what its source says before the bodies."""
    found = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    found = [node for node in found if not node.name.startswith("_")]
    return "\n".join(f"### `{n.name}`\n\n```py\n{head(n, source)}\n```\n" for n in found)


def head(node, source):
    """Return signature and docstring of a definition, of a class also its methods'."""
    first = node.body[0]
    end = first.end_lineno if ast.get_docstring(node) is not None else first.lineno - 1
    kept = dedent("\n".join(source.split("\n")[node.lineno - 1 : end])).rstrip()
    for method in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "forward"):
            kept += "\n\n" + indent(head(method, source), "    ")
    return kept


def npm_files(root, characters, formulas, cache):
    """Return the content of each file that the site takes from npm, by its address in the site.

    The fonts of the text keep the glyphs of `characters` and of ASCII, those of KaTeX what the
    typeset `formulas` show. What was made once is found in the folder `cache`.
    """
    modules = root / "node_modules"
    style = (modules / "katex/dist/katex.min.css").read_text(encoding="utf-8")
    files = {"assets/katex/katex.min.css": OLD_FORMATS.sub("", style).encode()}
    drawn, others = "".join(formulas), f"(?!{'|'.join(FACES.values())})"
    leaf = '<span class="{}[^"]*"[^>]*>([^<]+)</span>'.format
    shown = {face: "".join(re.findall(leaf(face), drawn)) for face in {others, *FACES.values()}}
    for font in sorted((modules / "katex/dist/fonts").glob("*.woff2")):
        letters = set(html.unescape(shown[FACES.get(font.stem, others)]))
        files[f"assets/katex/fonts/{font.name}"] = smaller(font, letters, cache)
    letters = characters | set(map(chr, range(0x20, 0x7F)))
    for name in TEXT_FONTS:
        files[f"assets/fonts/{Path(name).name}"] = smaller(modules / name, letters, cache)
    return files


def smaller(font, letters, cache):
    """Return the font with the glyphs of `letters` only."""
    # Kerning is a quarter of a font; at the size of text it is hardly seen.
    options = ["--flavor=woff2", "--no-hinting", "--layout-features="]
    options += ["--name-IDs=0", "--drop-tables+=STAT,gasp,vhea,vmtx"]  # of the names, the copyright
    options.append(f"--text={''.join(sorted(letters))}")
    name = hashlib.sha256(font.read_bytes() + "".join(options).encode()).hexdigest()
    kept = cache / f"{name[:32]}.woff2"
    if not kept.exists():
        from fontTools import subset  # most builds find every font made

        cache.mkdir(parents=True, exist_ok=True)
        draft = kept.with_suffix(f".{os.getpid()}")
        subset.main([str(font), *options, f"--output-file={draft}"])
        draft.replace(kept)
    return kept.read_bytes()


def third_party_markdown(root):
    """Return the Markdown of the page that lists third-party parts and their notices.

    Names and versions come from the locks, licences and notices from the packages as they are
    installed, so the page tells what this very build contains.
    """
    table, notices = "", ""
    for *cells, texts in [*python_parts(root), *npm_parts(root)]:
        table += f"| {' | '.join(cells)} |\n"
        for label, text in texts:
            block = indent(f"```text\n{text}\n```\n\n", "    ")
            notices += f'??? note "{cells[0]}: {label}"\n\n{block}'
    return PAGE.format(rows=table, notices=notices)


def python_parts(root):
    """Yield name, version, licence, use and notices of each package in SHIPPED."""
    pins = (root / "requirements.txt").read_text(encoding="utf-8").lower().split()
    locked = dict(pin.split("==") for pin in pins if "==" in pin)
    for name, use in SHIPPED.items():
        package = metadata.distribution(name)
        notices = read_notices(f.locate() for f in package.files if ".dist-info/" in str(f))
        if name == "mkdocs-material":
            theme = Path(package.locate_file("material/templates"))
            for icons in sorted((theme / ".icons").glob("*/LICENSE*")):
                notices += [(f"icons, {icons.parent.name}", icons.read_text("utf-8"))]
            scripts = (s.read_text("utf-8") for s in sorted((theme / "assets").rglob("*.js")))
            comments = dict.fromkeys(text for script in scripts for text in COMMENT.findall(script))
            notices += [("scripts", "\n".join(comments))]
        about = package.metadata
        licence = about["License-Expression"] or about["License"].split("\n")[0]
        yield name, locked[name], licence, use, notices


def npm_parts(root):
    """Yield the same of each package in package-lock.json."""
    lock = json.loads((root / "package-lock.json").read_text(encoding="utf-8"))
    for folder in (root / place for place in sorted(lock["packages"]) if place):
        about = json.loads((folder / "package.json").read_text(encoding="utf-8"))
        use = about.get("description", "").replace("|", "/")
        yield about["name"], about["version"], about["license"], use, read_notices(folder.iterdir())


def read_notices(files):
    """Return the name and text of each licence file among these."""
    found = sorted(Path(file) for file in files if NOTICE.fullmatch(Path(file).name))
    return [(file.name, file.read_text(encoding="utf-8").strip()) for file in found]
