"""What several test files look at: the sources of the pages, and the built site."""

import functools
import json
import re
import urllib.parse
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from markdown_it import MarkdownIt
from mkdocs.utils.meta import get_data

from hooks import expand, maths

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "site"
DOCS = ROOT / "docs"

# The sections of the book, in its order; not all of them are written yet.
PLAN = (
    "queries-keys-values",
    "attention-pooling",
    "attention-scoring-functions",
    "bahdanau-attention",
    "multihead-attention",
    "self-attention-and-positional-encoding",
    "transformer",
    "vision-transformer",
    "large-pretraining-transformers",
)
FURTHER = {  # modules that a section has besides its own
    "in_context_learning": "large-pretraining-transformers",
    "after_pretraining": "large-pretraining-transformers",
    "data_parallel": "large-pretraining-transformers",
}
SECTIONS = [key for key in PLAN if (DOCS / f"{key}.md").exists()]
PAGES = sorted(path.stem for path in DOCS.glob("*.md"))
SOLUTIONS = sorted(path.stem for path in (DOCS / "solutions").glob("*.py"))
INCLUDE = re.compile(r'^--8<-- "([^":]+):([\w-]+)"$', re.M)


# Sources


def body(key):
    """Return the Markdown of a page without its front matter."""
    return get_data((DOCS / f"{key}.md").read_text(encoding="utf-8"))[0]


def is_executed(key):
    """Tell whether the cells of a page are run."""
    return bool(get_data((DOCS / f"{key}.md").read_text(encoding="utf-8"))[1].get("execute"))


EXECUTED = [key for key in PAGES if is_executed(key)]


def expanded(key):
    """Return the Markdown of a page with the regions in the place of their names."""

    def region(match):
        return "\n".join(expand.region(ROOT, *match.groups(), f"docs/{key}.md", 0)[0])

    return INCLUDE.sub(region, body(key))


def read_page(key):
    """Return a page, or a solutions page, as the executor sees it."""
    if key.startswith("solutions/"):
        file = f"docs/{key}.py"
        text = (ROOT / file).read_text(encoding="utf-8")
        return expand.Page(key, file, expand.read_percent(text, file, ROOT))
    file = f"docs/{key}.md"
    line = (ROOT / file).read_text(encoding="utf-8").count("\n") - body(key).count("\n") + 1
    return expand.Page(key, file, expand.read_markdown(body(key), file, ROOT, line))


def cells(key):
    """Return the cells of a page in order."""
    return [block for block in read_page(key).blocks if isinstance(block, expand.Cell)]


def prose(key):
    """Return the text of a page, inline values as a word, without cells and shown code."""
    parts, last = [], None
    for block in read_page(key).blocks:
        if isinstance(block, expand.Inline):
            parts.append("VALUE")
        elif isinstance(block, expand.Text) and not block.raw:
            parts.append("\n\n" * isinstance(last, expand.Text) + block.text)
        else:
            parts.append("\n\n")
        last = block
    return re.sub(r"<!--.*?-->", "", "".join(parts), flags=re.S)


def captions(key):
    """Return the captions of a page."""
    return [cell.options["caption"] for cell in cells(key) if "caption" in cell.options]


def plain(key):
    """Return the words of a page alone: no code, no formulas, no captions."""
    text = maths.find_maths(re.sub(r"`[^`\n]*`", "CODE", prose(key)), 1)[0]
    return re.sub(r"kxm\w{16}x", "FORMULA", text)


def formulas(key):
    """Return the formulas of a page, those of captions included."""
    texts = [prose(key), *captions(key)]
    return [formula for text in texts for formula in maths.find_maths(text, 1)[1]]


def fences(text):
    """Return the fences of Markdown `text` as a real parser finds them: (info, content)."""
    found = [token for token in MarkdownIt().parse(text) if token.type == "fence"]
    return [(token.info.strip(), token.content) for token in found]


# The built site


def built():
    """Return the folder of the built site."""
    if not (SITE / "index.html").is_file():
        pytest.fail("There is no site to test. Build it first: make site", pytrace=False)
    return SITE


def html_pages():
    """Return the HTML files of the site by name; never none, so that a test without site fails."""
    names = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
    return [name for name in names if name != "404.html"] or ["index.html"]


@functools.cache
def text_of(name):
    """Return the text of a file of the site."""
    built()
    return (SITE / name).read_text(encoding="utf-8")


@functools.cache
def soup(name):
    """Return a page of the site, parsed."""
    return BeautifulSoup(text_of(name), "html.parser")


def html_of(key):
    """Return the name of the HTML file of a page."""
    return "index.html" if key == "index" else f"{key}/index.html"


@functools.cache
def home():
    """Return the address that the site believes to have, with a slash at its end."""
    return soup("index.html").select_one("link[rel=canonical]")["href"]


def address(name):
    """Return the address of a file of the site."""
    return home() + name.removesuffix("index.html")


def target(name, href):
    """Return (file, fragment) that a link of the file `name` leads to; None if it leads out."""
    url = urllib.parse.urljoin(address(name), href)
    url, fragment = urllib.parse.urldefrag(url)
    if not url.startswith(home()):
        return None
    path = urllib.parse.unquote(url.removeprefix(home()).partition("?")[0])
    return (f"{path}index.html" if path.endswith("/") or not path else path), fragment


def notebook(key):
    """Return the notebook of a page that a reader can take along."""
    return json.loads(text_of(f"downloads/{key}.ipynb"))


def joined(value):
    """Return a text of a notebook, which may be a list of lines."""
    return value if isinstance(value, str) else "".join(value)


TAKEN_ALONG = EXECUTED + [f"solutions/{key}" for key in SOLUTIONS]
