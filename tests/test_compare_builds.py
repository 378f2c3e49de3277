"""The comparison of two builds leaves out measured times and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import compare_builds
import pytest

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
    "page.ipynb": (notebook("3 s", "It took 3 s."), notebook("4 s", "It took 4 s.")),
    "page.py": ("# It took 3 s.\nx = 3\n", "# It took 14 s.\nx = 3\n"),
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
