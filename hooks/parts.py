"""The page of third-party parts: what the site ships or shows, and on what terms.

Names and versions come from the locks, licences and notices from the packages
as they are installed, so the page tells what this very build contains.
"""

import json
import re
from importlib import metadata
from pathlib import Path
from textwrap import indent

# What of each Python package reaches the reader. Of npm, everything is listed.
SHIPPED = {
    "mkdocs-material": "the theme: templates, styles, icons, scripts (with lunr for the search)",
    "mkdocs": "the builder: site map and search index",
    "mkdocs-jupyter": "styles of the solutions pages",
    "nbconvert": "markup of the solutions pages",
    "mkdocstrings-python": "markup of the API page",
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


def third_party_markdown(root):
    """Return the Markdown of the page that lists third-party parts and their notices."""
    parts = [*python_parts(Path(root)), *npm_parts(Path(root))]
    rows = "".join(f"| {' | '.join(part[:4])} |\n" for part in parts)
    blocks = (
        (f"{p[0]}: {label}", f"```text\n{text}\n```\n\n") for p in parts for label, text in p[4]
    )
    notices = "".join(f'??? note "{title}"\n\n{indent(block, "    ")}' for title, block in blocks)
    return PAGE.format(rows=rows, notices=notices)


def python_parts(root):
    """Yield name, version, licence, use and notices of each package in SHIPPED."""
    pins = (root / "requirements.txt").read_text(encoding="utf-8").lower().split()
    locked = dict(pin.split("==") for pin in pins if "==" in pin)
    for name, use in SHIPPED.items():
        package = metadata.distribution(name)
        files = (file.locate() for file in package.files if ".dist-info/" in str(file))
        notices = read_notices(files)
        if name == "mkdocs-material":
            theme = Path(package.locate_file("material/templates"))
            for icons in sorted((theme / ".icons").glob("*/LICENSE*")):
                notices += [(f"icons, {icons.parent.name}", icons.read_text("utf-8"))]
            scripts = (s.read_text("utf-8") for s in sorted((theme / "assets").rglob("*.js")))
            comments = sum(map(COMMENT.findall, scripts), [])
            notices += [("scripts", "\n".join(dict.fromkeys(comments)))]
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
