"""What no author writes: works cited, the reference of the package, fonts, third-party parts."""

import ast
import hashlib
import html
import io
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable
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
[CC BY 4.0](https://creativecommons.org/licenses/by/4.0/).\n\n## Notices\n\n{notices}"""
NOTICE = re.compile(r"(licen[cs]e|copying|notice)[\w.-]*", re.IGNORECASE)
COMMENT = re.compile(r"/\*!.*?\*/", re.DOTALL)  # what a minifier keeps: the notices

# Of npm, only letters that the book shows: whole, the fonts of a page would weigh 150 kB.
TEXT_FONTS = [
    "@fontsource/literata/files/literata-latin-400-normal.woff2",
    "@fontsource/literata/files/literata-latin-400-italic.woff2",
    "@fontsource/literata/files/literata-latin-600-normal.woff2",
    "@fontsource/jetbrains-mono/files/jetbrains-mono-latin-400-normal.woff2",
]
# Classes of KaTeX that have a font of their own; every other font may be asked for the rest.
FACES = {
    "mathnormal": "KaTeX_Math-Italic",
    "boldsymbol": "KaTeX_Math-BoldItalic",
    "mathbf": "KaTeX_Main-Bold",
    "textbf": "KaTeX_Main-Bold",
    "mathbb": "KaTeX_AMS-Regular",
    "amsrm": "KaTeX_AMS-Regular",
}
LEAF = re.compile(r'<span class="([^"]*)"[^>]*>([^<]+)</span>')
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
        line = (
            getattr(error, "lineno", None) or text.count("\n", 0, entry.start() if entry else 0) + 1
        )
        message = f"{type(error).__name__}: {error}" + (f" in {key}" if key else "")
        raise BookError("docs/references.bib", line, message) from None
    return works


def in_sentence(entry):
    """Return the authors and the year: Hu & Sun, 2018."""
    from pybtex.backends.plaintext import Backend
    from pybtex.richtext import Text

    names = [
        " ".join(person.prelast_names + person.last_names) for person in entry.persons["author"]
    ]
    names = [Text.from_latex(name).render(Backend()) for name in names]
    authors = f"{names[0]} et al." if len(names) > 2 else " & ".join(names)
    return f"{authors}, {entry.fields['year']}"


def list_works(works, cited):
    """Return the list of cited works as Markdown; `cited` is {key: links to pages}."""
    rows = sorted(cited, key=lambda key: works[key][0].lower())  # by family name
    return "\n".join(
        f'- <span id="ref-{key}"></span>{works[key][1]} Cited in {", ".join(cited[key])}.'
        for key in rows
    )


def list_names(source):
    """Return the public names of a module as Markdown: what its source says before the bodies."""
    return "\n".join(
        f"### `{node.name}`\n\n```py\n{head(node, source)}\n```\n"
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    )


def head(node, source):
    """Return signature and docstring of a definition, of a class also its methods'."""
    rows, first = source.split("\n"), node.body[0]
    has_words = ast.get_docstring(node) is not None
    kept = dedent(
        "\n".join(rows[node.lineno - 1 : first.end_lineno if has_words else first.lineno - 1])
    ).rstrip()
    if isinstance(node, ast.ClassDef):
        methods = [
            n
            for n in node.body
            if isinstance(n, ast.FunctionDef) and n.name in ("__init__", "forward")
        ]
        kept += "".join("\n\n" + indent(head(method, source), "    ") for method in methods)
    return kept


def npm_files(
    root: Path, characters: set[str], formulas: Iterable[str], cache: Path
) -> dict[str, bytes]:
    """Give the content of each file that the site takes from npm, by its address in the site.

    The fonts of the text keep the glyphs of `characters` and of ASCII, those of KaTeX what the
    typeset `formulas` show. What was made once is found in the folder `cache`.
    """
    modules = root / "node_modules"
    style = (modules / "katex/dist/katex.min.css").read_text(encoding="utf-8")
    files = {"assets/katex/katex.min.css": OLD_FORMATS.sub("", style).encode()}
    shown = letters_by_font(formulas)
    for font in sorted((modules / "katex/dist/fonts").glob("*.woff2")):
        letters = shown[font.stem if font.stem in FACES.values() else "rest"]
        files[f"assets/katex/fonts/{font.name}"] = smaller(font, letters, cache)
    letters = characters | set(map(chr, range(0x20, 0x7F)))
    for name in TEXT_FONTS:
        files[f"assets/fonts/{Path(name).name}"] = smaller(modules / name, letters, cache)
    return files


def letters_by_font(formulas: Iterable[str]) -> dict[str, set[str]]:
    """Collect the letters that formulas show in each font of FACES, and in the rest."""
    letters = defaultdict(set)
    for formula in formulas:
        for classes, text in LEAF.findall(formula):
            fonts = {FACES[name] for name in classes.split() if name in FACES} or {"rest"}
            for font in fonts:
                letters[font] |= set(html.unescape(text))
    return letters


def smaller(font: Path, letters: set[str], cache: Path) -> bytes:
    """Give the font with the glyphs of `letters` only."""
    whole, text = font.read_bytes(), "".join(sorted(letters))
    name = hashlib.sha256(whole + text.encode() + Path(__file__).read_bytes()).hexdigest()
    kept = cache / f"{name[:32]}.woff2"
    if kept.exists():
        return kept.read_bytes()
    # Kerning is a quarter of a font; short stretches of italics do without.
    kerning = [] if "italic" in font.stem else ["kern"]
    from fontTools import subset  # most builds find every font made

    options = subset.Options(flavor="woff2", layout_features=kerning, hinting=False)
    drawn = subset.load_font(io.BytesIO(whole), options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(text=text)
    subsetter.subset(drawn)
    content = io.BytesIO()
    subset.save_font(drawn, content, options)
    cache.mkdir(parents=True, exist_ok=True)
    draft = kept.with_suffix(f".{os.getpid()}")
    draft.write_bytes(content.getvalue())
    draft.replace(kept)
    return content.getvalue()


def third_party_markdown(root):
    """Return the Markdown of the page that lists third-party parts and their notices.

    Names and versions come from the locks, licences and notices from the packages as they are
    installed, so the page tells what this very build contains.
    """
    rows = [*python_parts(Path(root)), *npm_parts(Path(root))]
    table = "".join(f"| {' | '.join(part[:4])} |\n" for part in rows)
    blocks = (
        (f"{p[0]}: {label}", f"```text\n{text}\n```\n\n") for p in rows for label, text in p[4]
    )
    notices = "".join(f'??? note "{title}"\n\n{indent(block, "    ")}' for title, block in blocks)
    return PAGE.format(rows=table, notices=notices)


def python_parts(root):
    """Yield name, version, licence, use and notices of each package in SHIPPED."""
    pins = (root / "requirements.txt").read_text(encoding="utf-8").lower().split()
    locked = dict(pin.split("==") for pin in pins if "==" in pin)
    for name, use in SHIPPED.items():
        package = metadata.distribution(name)
        notices = read_notices(
            file.locate() for file in package.files if ".dist-info/" in str(file)
        )
        if name == "mkdocs-material":
            theme = Path(package.locate_file("material/templates"))
            for icons in sorted((theme / ".icons").glob("*/LICENSE*")):
                notices += [(f"icons, {icons.parent.name}", icons.read_text("utf-8"))]
            scripts = (s.read_text("utf-8") for s in sorted((theme / "assets").rglob("*.js")))
            notices += [
                ("scripts", "\n".join(dict.fromkeys(sum(map(COMMENT.findall, scripts), []))))
            ]
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
