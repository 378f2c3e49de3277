"""The notebooks and scripts of the pages: they run in an empty folder, and read well."""

import ast
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from book_files import (
    EXECUTED,
    SECTIONS,
    SITE,
    TAKEN_ALONG,
    built,
    cells,
    joined,
    notebook,
    text_of,
)

# Runs a notebook with the kernel of this environment, in the folder where it is started.
DRIVER = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
nbformat.write(notebook, "result.ipynb")
"""


def reader_environment(**more):
    """Return the variables of a reader's machine: no repository, no network, another hash seed."""
    nowhere = "http://127.0.0.1:9"
    own = {"http_proxy": nowhere, "https_proxy": nowhere, "HTTPS_PROXY": nowhere}
    own |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    dropped = ("PYTHONPATH", "MPLBACKEND", "BOOK_ROOT")
    return {k: v for k, v in os.environ.items() if k not in dropped} | own | more


def quick_cells(key):
    """Return the cells of a notebook before the first that trains for long (`cache: true`).

    The build has run all of them; here the question is whether they run in an empty folder.
    `make notebooks` runs the notebooks to their ends.
    """
    found = notebook(key)["cells"]
    long = [cell.options.get("cache", False) for cell in cells(key)]
    code = [i for i, cell in enumerate(found) if cell["cell_type"] == "code"][-len(long) :]
    return found[: code[long.index(True)]] if any(long) else found


def start(key, suffix, folder):
    """Run the quick cells of a page in an empty folder, as notebook or script."""
    folder.mkdir(parents=True)
    part = folder.parent / f"{key.rpartition('/')[2]}.{suffix}"
    if suffix == "py":
        code = [i for i, cell in enumerate(quick_cells(key)) if cell["cell_type"] == "code"]
        pieces = re.split(r"^(?=# %%)", text_of(f"downloads/{key}.py"), flags=re.M)
        part.write_text("".join(just_code(pieces)[: len(code) + 1]), encoding="utf-8")
        command, more = [sys.executable, "-W", "error", str(part)], {"MPLBACKEND": "agg"}
    else:
        part.write_text(json.dumps(notebook(key) | {"cells": quick_cells(key)}), encoding="utf-8")
        command, more = [sys.executable, "-W", "ignore", "-c", DRIVER, str(part)], {}
    return subprocess.run(
        command,
        cwd=folder,
        env=reader_environment(**more),
        check=False,
        capture_output=True,
        text=True,
    )


def just_code(pieces):
    """Return the head of a script and its code cells."""
    return [piece for piece in pieces if not piece.startswith("# %% [markdown]")]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run all notebooks and scripts, two at a time; give what became of each."""
    folder = tmp_path_factory.mktemp("empty")
    jobs = [(key, suffix) for key in TAKEN_ALONG for suffix in ("ipynb", "py")]
    with ThreadPoolExecutor(2) as pool:
        tasks = {job: pool.submit(start, *job, folder / job[1] / job[0]) for job in jobs}
        return {job: (task.result(), folder / job[1] / job[0]) for job, task in tasks.items()}


def texts(cell):
    """Return what a cell printed, and its errors and tables."""
    found = []
    for output in cell.get("outputs", []):
        if output["output_type"] == "stream":
            name, text = output["name"], joined(output["text"])
            if found and found[-1][0] == name:  # kernels cut a stream where they like
                text = found.pop()[1] + text
            found.append((name, text))
        elif output["output_type"] == "error":
            found.append((output["ename"], output["evalue"]))
        elif "text/html" in output["data"]:
            found.append(("table", joined(output["data"]["text/html"])))
    return found


@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_a_notebook_runs_in_an_empty_folder_and_gives_the_same(key, ended):
    run, folder = ended[key, "ipynb"]
    assert run.returncode == 0, run.stderr[-3000:]
    assert [path.name for path in folder.iterdir()] == ["result.ipynb"], "it writes files"
    again = json.loads((folder / "result.ipynb").read_text(encoding="utf-8"))
    for then, now in zip(quick_cells(key), again["cells"], strict=True):
        if "timing" not in then["metadata"].get("tags", []):
            assert texts(now) == texts(then), joined(then["source"])


@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_a_script_runs_in_an_empty_folder_and_prints_the_same(key, ended):
    run, folder = ended[key, "py"]
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stderr == ""
    assert list(folder.iterdir()) == [], "it writes files"
    for cell in quick_cells(key):
        if "timing" not in cell["metadata"].get("tags", []):
            for kind, text in texts(cell):
                assert kind != "stdout" or text.strip() in run.stdout


@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_the_script_has_the_cells_of_the_notebook(key):
    text = text_of(f"downloads/{key}.py")
    ast.parse(text)
    code = re.findall(r"^# %%(?! \[markdown\])", text, re.M)
    assert len(code) == len([c for c in notebook(key)["cells"] if c["cell_type"] == "code"])
    assert text.rstrip("\n").splitlines()[-1].startswith("#"), "the licence is missing"


# Reading


UNRESOLVED = {
    "a reference": r"(?<![\w@/.])@(?:fig|tbl|eq|sec|thm)-",
    "a citation": r"\[@\w",
    "an inline value": r"\{python\}",
    "a label": r"\{#|\{ ?\.[a-z]|\{:",
    "an admonition": r"^ *(?:!!!|\?\?\?\+?|===) ",
    "HTML of the site": r"<(?:span|div|figure|button)\b|data-timing|class=",
    "an include or an option": r"--8<--|^#\|",
    "a comment": r"<!--",
    "a slot": r"bkslot\d|kxm[0-9a-f]{16}x",
    "a link to a source": r"\]\([^)]*\.(?:md|ipynb)\b|\]\((?!https?://)",
    "a place in the site's text": r"^\[Solution\]\(solutions",
}


def words(key):
    """Return the text cells of a notebook without their code."""
    found = [joined(c["source"]) for c in notebook(key)["cells"] if c["cell_type"] == "markdown"]
    text = "\n\n".join(found)
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)


@pytest.mark.parametrize("what", UNRESOLVED)
@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_nothing_in_a_notebook_needs_the_site_to_be_read(key, what):
    found = re.search(UNRESOLVED[what], words(key), re.M)
    assert not found, words(key)[max(0, found.start() - 60) : found.end() + 60]


@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_formulas_of_a_notebook_are_closed_and_numbered(key):
    text = words(key).replace(r"\$", "")
    blocks = text.split("$$")
    assert len(blocks) % 2 == 1, "a $$ is not closed"
    tags = re.findall(r"\\tag\{([^}]*)\}", text)
    inside = "".join(blocks[1::2])
    assert re.findall(r"\\tag\{([^}]*)\}", inside) == tags, "a number outside of a formula"
    assert len(tags) == len(set(tags))
    for paragraph in re.split(r"\n[ >]*\n", "".join(blocks[::2])):
        assert paragraph.count("$") % 2 == 0, paragraph


@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_figures_of_a_notebook_have_captions(key):
    labels = [cell.options.get("label") for cell in cells(key)]
    found = notebook(key)["cells"]
    code = [i for i, cell in enumerate(found) if cell["cell_type"] == "code"][-len(labels) :]
    numbers = []
    for label, place in zip(labels, code, strict=True):
        if label:
            caption = joined(found[place + 1]["source"])
            kind = {"fig": "Figure", "tbl": "Table"}[label.partition("-")[0]]
            match = re.match(rf"\*\*{kind} (\S+)\.\*\* \S", caption)
            assert match, f"{label}: {caption[:80]}"
            numbers.append((kind, match[1]))
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_the_first_cell_brings_the_modules_along(key):
    first = notebook(key)["cells"][0]
    brought = "book-setup" in first["metadata"].get("tags", [])
    needed = any(re.search(r"^\s*(from|import) snippets", c.source, re.M) for c in cells(key))
    assert brought == needed
    if brought:
        assert first["metadata"]["jupyter"]["source_hidden"] and first["outputs"] == []
    if key in SECTIONS:
        assert brought


@pytest.mark.parametrize("key", TAKEN_ALONG)
def test_a_notebook_is_marked_as_run(key):
    code = [cell for cell in notebook(key)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert notebook(key)["metadata"]["kernelspec"]["name"] == "python3"
    for cell in code:
        for output in cell["outputs"]:
            assert output["output_type"] != "error" or output["traceback"] == []


def test_there_is_a_notebook_for_each_page_that_runs():
    made = {path.relative_to(SITE / "downloads") for path in (built() / "downloads").rglob("*.*")}
    wanted = {f"{key}.{suffix}" for key in TAKEN_ALONG for suffix in ("ipynb", "py")}
    assert {str(path) for path in made} == wanted
    assert set(SECTIONS) <= set(EXECUTED)
