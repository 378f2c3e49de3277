"""The comparison of two builds leaves out measured times and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import compare_builds
import pytest

from hooks import expand, render

SCRIPT = Path(compare_builds.__file__)


def notebook(printed, prose, tags=("timing",)):
    """Return a notebook of a cell that printed something, and a text below it."""
    output = {"output_type": "stream", "name": "stdout", "text": printed}
    code = {
        "cell_type": "code",
        "metadata": {"tags": list(tags)},
        "source": "",
        "outputs": [output],
    }
    return json.dumps({"cells": [code, {"cell_type": "markdown", "metadata": {}, "source": prose}]})


SAME = {
    "page.html": ('<p>a <b data-timing="">3 s</b></p>', '<p>a <b data-timing="">4 s</b></p>'),
    "page.ipynb": (notebook("3 s", "It took 3 s."), notebook("4 s", "It took 0.96 s.")),
    "page.py": ("# It took 3 s.\nx = 3\n", "# It took 1.4 s.\nx = 3\n"),
    "asset.css": ("a {}", "a {}"),
}
OTHER = {
    "page.html": ('<p>3 <b data-timing="">3 s</b></p>', '<p>4 <b data-timing="">3 s</b></p>'),
    "page.ipynb": (notebook("3", "It is so."), notebook("3", "It is not so.")),
    "untimed.ipynb": (notebook("3", "", tags=()), notebook("4", "", tags=())),
    "page.py": ("# It took 3 s.\nx = 3\n", "# It took 3 s.\nx = 4\n"),
    "untimed.py": ("# It is 3.\n", "# It is 4.\n"),
    "plain.html": ("<p>3</p>", "<p>4</p>"),
    "search_index.json": ('{"docs": [1]}', '{"docs": [2]}'),
    "asset.css": ("a {}", "b {}"),
}


@pytest.fixture
def sides(tmp_path):
    """Return a function that writes two builds which differ in the given files."""

    def write(files):
        for number, side in enumerate(("one", "other")):
            for name, contents in {**SAME, **files}.items():
                (tmp_path / side).mkdir(exist_ok=True)
                (tmp_path / side / name).write_text(contents[number])
        return tmp_path / "one", tmp_path / "other"

    return write


def compare(*folders):
    """Run the script; return its status and what it said."""
    command = [sys.executable, str(SCRIPT), *map(str, folders)]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    return run.returncode, run.stdout


def test_builds_that_differ_in_times_are_the_same(sides):
    status, said = compare(*sides({}))
    assert status == 0 and said.startswith("4 files compared, 0 not the same")


@pytest.mark.parametrize("name", OTHER)
def test_any_other_difference_is_named(sides, name):
    status, said = compare(*sides({name: OTHER[name]}))
    assert status != 0 and said.splitlines()[1:] == [f"  {name}"]


def test_a_missing_file_is_named(sides):
    one, other = sides({})
    (one / "only.txt").touch()
    assert compare_builds.differences(one, other) == ["only.txt"]
    assert compare_builds.differences(other, one) == ["only.txt"]


def test_two_empty_builds_are_not_the_same(tmp_path):
    assert compare(tmp_path, tmp_path)[0] != 0


# What is marked as a time


PAGE = """
```python
#| timing: true
import time

n, x, costs = 5, 1, {}
for name in ("a", "b"):
    start = time.process_time()
    costs[name] = time.process_time() - start


def seconds():
    each = 3
    return time.process_time() - start
```
"""
LATER = {
    "print(costs['a'])": True,
    "total = sum(costs.values())\nprint(total)": True,
    "print(seconds())": True,
    "def show():\n    print(costs)": True,
    "start += 1": True,
    "each = [x for x in range(3)]\nprint(each)": False,
    "print([n for n in range(3)], [lambda costs: costs])": False,
    "for name in 'ab':\n    print(name)": False,
    "for name in name:\n    pass": True,
    "costs = {}\nprint(costs)": False,
}


@pytest.mark.parametrize("code", LATER)
def test_only_what_depends_on_a_time_is_marked(code):
    text = f"{PAGE}\n```python\n{code}\n```\n\nIt is `{{python}} 2 + 2`.\n"
    page = expand.Page("page", "page.md", expand.read_markdown(text, "page.md", Path()))
    places = [i for i, block in enumerate(page.blocks) if not isinstance(block, expand.Text)]
    marked = render.timed_names(page)
    assert [place in marked for place in places] == [True, LATER[code], False]


def test_what_comes_from_a_marked_cell_is_marked_and_a_new_value_is_not():
    cells = ["ratio = costs['a'] / 2", "print(ratio)", "ratio = 3", "print(ratio)"]
    text = PAGE + "".join(f"\n```python\n{code}\n```\n" for code in cells)
    page = expand.Page("page", "page.md", expand.read_markdown(text, "page.md", Path()))
    places = [i for i, block in enumerate(page.blocks) if not isinstance(block, expand.Text)]
    marked = render.timed_names(page)
    assert [place in marked for place in places] == [True, True, True, False, False]
