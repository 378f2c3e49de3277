"""A book of a few lines in a folder of its own, for the tests of the executor."""

import contextlib
import shutil
import textwrap
from pathlib import Path

import yaml
from click.testing import CliRunner
from mkdocs.__main__ import cli

from hooks import expand, run

ROOT = Path(__file__).resolve().parents[1]
FONTS = run.FOLDER / "matplotlib"  # matplotlib's list of fonts, which takes seconds to make
BORROWED = ("hooks", "node_modules", "requirements.txt", "package-lock.json", FONTS)


class Toy:
    """Pages and modules in a temporary folder, run and built as the book's are."""

    def __init__(self, root, like=None):
        self.root, self.runs = root, root / run.FOLDER / "runs"
        if like:
            shutil.copytree(like.root, root, symlinks=True, dirs_exist_ok=True)
        else:
            (ROOT / FONTS).mkdir(parents=True, exist_ok=True)
            (root / FONTS).parent.mkdir(parents=True)
            for name in BORROWED:
                (root / name).symlink_to(ROOT / name)

    def write(self, name, text):
        """Write a file below the root."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
        return path

    def edit(self, name, old, new):
        """Replace text in a file, which must have it once."""
        path = self.root / name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1
        path.write_text(text.replace(old, new), encoding="utf-8")

    def expand(self, *names):
        """Return expanded pages."""
        pages = []
        for name in names:
            text = (self.root / name).read_text(encoding="utf-8")
            read = expand.read_percent if name.endswith(".py") else expand.read_markdown
            key = name.removeprefix("docs/").rpartition(".")[0]
            pages.append(expand.Page(key, name, read(text, name, self.root)))
        return pages

    def run(self, *names, tell=lambda *_: None):
        """Run pages; return what the cells of each gave, in this order."""
        pages = self.expand(*names)
        runs = run.run_pages(self.root, pages, tell)
        return [runs[page.key] for page in pages]

    def cells(self, *sources, name="docs/page.md"):
        """Write a page that has these cells, and paragraphs where there is a backtick; run it."""
        self.write(name, page_text(*sources))
        return self.run(name)[0]

    def config(self, *nav):
        """Write the book's mkdocs.yml, for these pages."""
        text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
        before, rest = text.split("\nnav:\n")
        after = rest[rest.index("\n# Everything") :]
        entries = yaml.safe_dump({"nav": list(nav)})
        (self.root / "mkdocs.yml").write_text(f"{before}\n{entries}{after}", encoding="utf-8")

    def build(self):
        """Build the site, strictly; return the exit code, stdout and stderr."""
        with contextlib.chdir(self.root):
            result = CliRunner().invoke(cli, ["build", "--strict"])
        return result.exit_code, result.stdout, result.stderr


def page_text(*sources):
    """Return Markdown that has these cells and paragraphs."""
    parts = [textwrap.dedent(source).strip("\n") for source in sources]
    fenced = [part if "`" in part else f"```python\n{part}\n```" for part in parts]
    return "# Page\n\n" + "\n\n".join(fenced) + "\n"


def printed(result):
    """Return all that the cells of a run printed."""
    outputs = [output for outputs in result.outputs for output in outputs]
    return "".join(output.get("text", "") for output in outputs)
