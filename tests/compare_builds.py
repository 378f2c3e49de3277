"""Compare two builds of the site byte for byte: python compare_builds.py ONE OTHER.

Measured times may differ. They are marked when a page is made (`data-timing` in HTML, a tag in
notebooks), and what is marked is left out before the bytes are compared. The prose of a notebook
and of its script is compared without numbers if the page measures times, for marks would be in
the reader's way there; its numbers stand in the HTML too, where they are compared.
"""

import json
import re
import sys
from pathlib import Path

from bs4 import BeautifulSoup

NUMBER = r"\d+(?:[.,]\d+)*"


def comparable(file):
    """Return the content of a file without what may differ from run to run."""
    content = file.read_bytes()
    if file.suffix == ".html" and b"data-timing" in content:
        soup = BeautifulSoup(content, "html.parser")
        for element in soup.select("[data-timing]"):
            element.decompose()
        return str(soup).encode()
    if file.suffix == ".ipynb" and is_timed(file):
        notebook = json.loads(content)
        for cell in notebook["cells"]:
            if "timing" in cell["metadata"].get("tags", []):
                cell["outputs"] = []
            if cell["cell_type"] == "markdown":
                cell["source"] = re.sub(NUMBER, "0", "".join(cell["source"]))
        return json.dumps(notebook).encode()
    if file.suffix == ".py" and is_timed(file.with_suffix(".ipynb")):
        text = content.decode("utf-8")
        return re.sub(r"(?m)^#.*$", lambda row: re.sub(NUMBER, "0", row[0]), text).encode()
    return content


def is_timed(notebook):
    """Tell whether a notebook has cells that measure times."""
    if not notebook.is_file():
        return False
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return any("timing" in cell["metadata"].get("tags", []) for cell in cells)


def differences(one, other):
    """Return the names of the files that are missing on a side or not the same."""
    sides = [{f.relative_to(s) for f in s.rglob("*") if f.is_file()} for s in (one, other)]
    both = sides[0] & sides[1]
    changed = {name for name in both if comparable(one / name) != comparable(other / name)}
    return sorted(str(name) for name in (sides[0] ^ sides[1]) | changed)


if __name__ == "__main__":
    first, second = map(Path, sys.argv[1:])
    count = sum(file.is_file() for file in first.rglob("*"))
    different = differences(first, second)
    print(f"{count} files compared, {len(different)} not the same", *different, sep="\n  ")
    sys.exit(bool(different) or not count)
