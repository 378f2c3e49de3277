"""The parts of pages that no author writes: works cited, the reference of the package, third parties."""

import ast
import json
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
[CC BY 4.0](https://creativecommons.org/licenses/by/4.0/).\n\n## Notices\n\n{notices}"""
NOTICE = re.compile(r"(licen[cs]e|copying|notice)[\w.-]*", re.IGNORECASE)
COMMENT = re.compile(r"/\*!.*?\*/", re.DOTALL)  # what a minifier keeps: the notices


def read_works(text):
    """Return {key: (words for a sentence, entry for the list)} of the BibTeX file docs/references.bib."""
    from pybtex import errors  # a build that has read this text before does not need pybtex
    from pybtex.backends.html import Backend
    from pybtex.database import parse_string
    from pybtex.style.formatting.unsrt import Style

    errors.set_strict_mode(True)
    key, works = None, {}
    try:
        for key, entry in parse_string(text, "bibtex").entries.items():
            listed = next(Style().format_entries([entry])).text.render(Backend())
            works[key] = (in_sentence(entry), " ".join(listed.split()))
    except Exception as error:
        entry = re.search(rf"{{\s*{key or str(error).split()[-1]}\s*,", text)
        line = getattr(error, "lineno", None) or text.count("\n", 0, entry.start() if entry else 0) + 1
        message = f"{type(error).__name__}: {error}" + (f" in {key}" if key else "")
        raise BookError("docs/references.bib", line, message) from None
    return works


def in_sentence(entry):
    """Return the authors and the year: Hu & Sun, 2018."""
    from pybtex.backends.plaintext import Backend
    from pybtex.richtext import Text

    names = [" ".join(person.prelast_names + person.last_names) for person in entry.persons["author"]]
    names = [Text.from_latex(name).render(Backend()) for name in names]
    authors = f"{names[0]} et al." if len(names) > 2 else " & ".join(names)
    return f"{authors}, {entry.fields['year']}"


def list_works(works, cited):
    """Return the list of the works that pages cite, as Markdown; `cited` is {key: links to pages}."""
    rows = sorted(cited, key=lambda key: works[key][0].lower())  # by family name
    return "\n".join(f'- <span id="ref-{key}"></span>{works[key][1]} Cited in {", ".join(cited[key])}.' for key in rows)


def list_names(source):
    """Return the public names of a module as Markdown: what its source says before the bodies."""
    return "\n".join(
        f"### `{node.name}` {{#{node.name}}}\n\n```py\n{head(node, source)}\n```\n"
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    )


def head(node, source):
    """Return a definition without its body: signature and docstring, of a class also its methods'."""
    rows, first = source.split("\n"), node.body[0]
    has_words = ast.get_docstring(node) is not None
    kept = dedent("\n".join(rows[node.lineno - 1 : first.end_lineno if has_words else first.lineno - 1])).rstrip()
    if isinstance(node, ast.ClassDef):
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name in ("__init__", "forward")]
        kept += "".join("\n\n" + indent(head(method, source), "    ") for method in methods)
    return kept


def third_party_markdown(root):
    """Return the Markdown of the page that lists third-party parts and their notices.

    Names and versions come from the locks, licences and notices from the packages as they are
    installed, so the page tells what this very build contains.
    """
    rows = [*python_parts(Path(root)), *npm_parts(Path(root))]
    table = "".join(f"| {' | '.join(part[:4])} |\n" for part in rows)
    blocks = ((f"{p[0]}: {label}", f"```text\n{text}\n```\n\n") for p in rows for label, text in p[4])
    notices = "".join(f'??? note "{title}"\n\n{indent(block, "    ")}' for title, block in blocks)
    return PAGE.format(rows=table, notices=notices)


def python_parts(root):
    """Yield name, version, licence, use and notices of each package in SHIPPED."""
    pins = (root / "requirements.txt").read_text(encoding="utf-8").lower().split()
    locked = dict(pin.split("==") for pin in pins if "==" in pin)
    for name, use in SHIPPED.items():
        package = metadata.distribution(name)
        notices = read_notices(file.locate() for file in package.files if ".dist-info/" in str(file))
        if name == "mkdocs-material":
            theme = Path(package.locate_file("material/templates"))
            for icons in sorted((theme / ".icons").glob("*/LICENSE*")):
                notices += [(f"icons, {icons.parent.name}", icons.read_text("utf-8"))]
            scripts = (s.read_text("utf-8") for s in sorted((theme / "assets").rglob("*.js")))
            notices += [("scripts", "\n".join(dict.fromkeys(sum(map(COMMENT.findall, scripts), []))))]
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
