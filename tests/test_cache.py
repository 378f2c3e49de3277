"""The run cache is fast and never stale: each kind of edit, damage, and builds that meet."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from toy import Toy, printed

from hooks import run

PAGE = """
    # Page

    Some prose.

    ```python
    from pathlib import Path

    import snippets.first
    print("first", snippets.first.value())
    ```

    ```python
    print("data", Path("data/words.txt").read_text().strip())
    print("extra", Path("data/extra.txt").exists())
    print("names", sorted(path.name for path in Path("data").iterdir()))
    ```

    ```python
    #| label: tbl-nothing
    #| caption: What it says.
    print("plain")
    ```

    The value is `{python} "inline " + str(1 + 1)`.
"""
MODULES = {
    "first": "from snippets.second import two\n\ndef value():\n    from snippets import late\n"
    "    return two() + late.ONE\n",
    "second": "from snippets.third import THREE\n\ndef two():\n    return THREE - 1\n",
    "third": "THREE = 3\n",
    "late": "ONE = 1\n",
    "unused": "ZERO = 0\n",
}
COUNT = 4  # cells and inline values of the page


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a book whose page has run once."""
    toy = Toy(tmp_path_factory.mktemp("built"))
    toy.write("docs/page.md", PAGE)
    toy.write("snippets/__init__.py", "")
    for name, text in MODULES.items():
        toy.write(f"snippets/{name}.py", text)
    toy.write("data/words.txt", "attention\n")
    (result,) = toy.run("docs/page.md")
    assert (result.kept, printed(result)) == (
        0,
        "first 3\ndata attention\nextra False\nnames ['words.txt']\nplain\ninline 2",
    )
    return toy


@pytest.fixture
def toy(built, tmp_path):
    """Return a copy of that book, with its cache."""
    return Toy(tmp_path / "copy", like=built)


def again(toy):
    """Run the page once more; return how many results came from the cache, and what it printed."""
    (result,) = toy.run("docs/page.md")
    assert len(result.outputs) == len(result.seconds) == COUNT
    return result.kept, printed(result)


def test_nothing_changed_nothing_runs(toy):
    assert again(toy)[0] == COUNT


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Some prose.", "Other prose,\n\n* with a list."),
        ("The value", "A value"),
        ("What it says.", "Another caption."),
        ("#| label", "#| echo: false\n#| label"),
        ("tbl-nothing", "tbl-something"),
        ("#| label", "#| timing: true\n#| timeout: 9\n#| check: true\n#| alt: Words.\n#| label"),
    ],
)
def test_edits_that_change_no_result_run_nothing(toy, old, new):
    toy.edit("docs/page.md", old, new)
    assert again(toy)[0] == COUNT


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("docs/page.md", '"plain"', '"fancy"', "fancy"),
        ("docs/page.md", "1 + 1", "1 + 4", "inline 5"),
        ("docs/page.md", "#| label", "#| stderr: true\n#| label", "plain"),
        ("snippets/first.py", "two() +", "two() -", "first 1\n"),
        ("snippets/second.py", "- 1", "+ 1", "first 5\n"),
        ("snippets/third.py", "= 3", "= 5", "first 5\n"),  # imported by what is imported, same size
        ("snippets/late.py", "= 1", "= 7", "first 9\n"),  # imported in a function
        ("data/words.txt", "attention", "similarity", "data similarity"),
    ],
)
def test_other_edits_run_the_page(toy, file, old, new, expected):
    toy.edit(file, old, new)
    kept, text = again(toy)
    assert kept == 0
    assert expected in text


def test_an_edit_of_the_same_size_within_a_second_is_noticed(toy):
    path = toy.root / "snippets/third.py"
    for value in (4, 5):
        before = path.stat()
        path.write_text(f"THREE = {value}\n")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        kept, text = again(toy)
        assert kept == 0
        assert f"first {value}\n" in text


def test_kept_byte_code_is_not_trusted(toy):
    """A test run, say, leaves byte code of the old source that has the new one's time and size."""
    path = toy.root / "snippets/third.py"
    os.system(f"cd {toy.root} && PYTHONPATH=. python3 -m compileall -q snippets")
    before = path.stat()
    path.write_text("THREE = 6\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "first 6\n" in again(toy)[1]


def test_files_that_appear_and_vanish_are_noticed(toy):
    extra = toy.write("data/extra.txt", "more")
    kept, text = again(toy)
    assert kept == 0
    assert "extra True\nnames ['extra.txt', 'words.txt']" in text
    extra.unlink()
    assert again(toy)[0] == COUNT  # as it was before
    (toy.root / "data/words.txt").unlink()
    with pytest.raises(run.BookError, match="FileNotFoundError"):
        again(toy)


def test_a_module_that_appears_where_one_was_missed_is_noticed(toy):
    source = """
        try:
            import snippets.later
            print("there")
        except ImportError:
            print("missing")
    """
    assert printed(toy.cells(source)) == "missing\n"
    toy.write("snippets/later.py", "")
    assert printed(toy.cells(source)) == "there\n"


def test_what_the_page_does_not_use_runs_nothing(toy):
    toy.write("snippets/new.py", "raise ValueError\n")
    toy.edit("snippets/unused.py", "0", "1")
    toy.write("data.txt", "")
    toy.write("docs/other.md", "# Other\n")
    assert again(toy)[0] == COUNT


def test_only_the_dependents_of_a_module_run(toy):
    toy.write("docs/other.md", "```python\nprint(1)\n```\n")
    toy.run("docs/other.md")
    toy.edit("snippets/third.py", "3", "4")
    page, other = toy.run("docs/page.md", "docs/other.md")
    assert (page.kept, other.kept) == (0, 1)


def test_undoing_an_edit_comes_from_the_cache(toy):
    toy.edit("snippets/third.py", "3", "4")
    toy.edit("docs/page.md", "plain", "fancy")
    assert again(toy)[0] == 0
    toy.edit("snippets/third.py", "4", "3")
    toy.edit("docs/page.md", "fancy", "plain")
    kept, text = again(toy)
    assert kept == COUNT
    assert "first 3\n" in text


@pytest.mark.parametrize("name", ["run.environment", "packages", "executor"])
def test_another_executor_or_package_runs_all_again(toy, monkeypatch, name):
    if name == "packages":
        toy.write("lib/torch-9.9.9.dist-info/METADATA", "")
        monkeypatch.syspath_prepend(str(toy.root / "lib"))
    elif name == "executor":
        for part in ("run.py", "kernel.py"):
            text = (toy.root / "hooks" / part).read_text(encoding="utf-8")
            toy.write(f"other/{part}", text + "# edited\n")
        monkeypatch.setattr(run, "__file__", str(toy.root / "other/run.py"))
    else:
        monkeypatch.setattr(run, "environment", lambda: "another")
    assert again(toy)[0] == 0


# Snapshots


TRAINED = [
    "#| cache: true\nfrom pathlib import Path\nimport time\nwhen = time.time_ns()\nx = [1]",
    "#| timing: true\nprint(when, x)",
]


def test_an_edit_of_a_plot_does_not_train_again(toy):
    first = toy.cells(*TRAINED)
    assert first.kept == 0
    second = toy.cells(TRAINED[0], TRAINED[1].replace("x)", "x, 'edited')"), "Then `{python} x`.")
    assert second.kept == 1  # what is printed tells that the first cell has not run
    assert printed(second) == printed(first).strip() + " edited\n[1]"
    assert toy.cells(*TRAINED).kept == 2
    assert toy.cells(TRAINED[0].replace("[1]", "[2]"), TRAINED[1]).kept == 0


def test_what_a_snapshot_rests_on_is_noticed(toy):
    source = "#| cache: true\nimport snippets.first\nx = snippets.first.value()"
    toy.cells(source, "print(x)")
    toy.edit("snippets/late.py", "1", "9")
    result = toy.cells(source, "print(x + 1)")
    assert result.kept == 0
    assert printed(result) == "12\n"


@pytest.mark.parametrize("damage", ["changed", "missing", "unreadable"])
def test_a_damaged_snapshot_is_made_anew(toy, damage):
    first = toy.cells(*TRAINED)
    (state,) = toy.runs.glob("*.state")
    if damage == "changed":
        content = state.read_bytes()
        state.write_bytes(content[:-9] + b"x" + content[-8:])
    elif damage == "missing":
        state.unlink()
    else:  # whole, yet not to be read
        state.write_bytes(b"x")
        for path in toy.runs.glob("*.json"):
            entry = run.read_entry(path)
            run.write_entry(path, entry | {"state": entry["state"] and run.digest(state)})
    result = toy.cells(TRAINED[0], "print(when)")
    assert printed(result).split()[0] != printed(first).split()[0]
    assert len(result.outputs) == 2


# Damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-40],
        lambda text: text.replace("attention", "attentive"),
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.split("\n", 1)[1],
        lambda text: "\udcff" + text,
    ],
    ids=["truncated", "changed", "half", "empty", "no checksum", "not UTF-8"],
)
def test_a_damaged_entry_is_made_anew(toy, damage):
    (path,) = toy.runs.glob("*.json")
    text = path.read_text(encoding="utf-8")
    path.write_text(damage(text), encoding="utf-8", errors="surrogateescape")
    kept, printed_text = again(toy)
    assert kept == 0
    assert "data attention\n" in printed_text
    assert again(toy)[0] == COUNT


def test_a_damaged_list_of_times_does_not_matter(toy):
    (toy.root / run.FOLDER / "seconds.json").write_text("{")
    assert again(toy)[0] == COUNT


def test_half_written_files_are_not_entries(toy):
    (toy.runs / "tmp12345").write_text("half")
    assert again(toy)[0] == COUNT


# Time and size


def test_a_file_that_changes_while_the_page_runs_leaves_no_wrong_entry(toy):
    toy.edit("docs/page.md", "Some prose.", "```python\nimport snippets.third\n```")

    def tell(page, done, total):
        if done == 1:  # the module is imported already
            toy.write("snippets/third.py", "THREE = 8\n")

    toy.run("docs/page.md", tell=tell)
    (result,) = toy.run("docs/page.md")
    assert "first 8\n" in printed(result)
    assert result.kept == 0


def test_a_module_that_changes_before_a_snapshot_is_used_leaves_no_wrong_entry(toy):
    before = "#| cache: true\nimport snippets.third\nx = snippets.third.THREE"
    toy.cells(before, "print(x, snippets.third.THREE)")
    changed = []

    def tell(page, done, total):
        if not changed:  # between the look at the cache and the run
            changed.append(toy.write("snippets/third.py", "THREE = 8\n"))

    toy.write("docs/page.md", f"```python\n{before}\n```\n\n```python\nprint(x, 1)\n```\n")
    toy.run("docs/page.md", tell=tell)
    (result,) = toy.run("docs/page.md")
    assert printed(result) == "8 1\n"


def test_two_builds_at_once_do_not_disturb_each_other(toy):
    toy.edit("docs/page.md", "plain", "fancy")
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: again(toy), range(2)))
    assert both[0][1] == both[1][1]
    assert again(toy) == (COUNT, both[0][1])
    assert not [path for path in toy.runs.iterdir() if path.suffix != ".json"]


def test_the_oldest_entries_go_first(toy, monkeypatch):
    (entry,) = toy.runs.glob("*.json")
    for age in (1, 2, 3):
        path = toy.runs / f"old{age}.json"
        path.write_bytes(bytes(1000))
        os.utime(path, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(run, "SIZE_LIMIT", entry.stat().st_size + 1500)
    os.utime(entry, (0, 0))  # to use an entry makes it young
    assert again(toy)[0] == COUNT
    assert {path.name for path in toy.runs.iterdir()} == {entry.name, "old1.json"}


def test_the_seed_of_hashes_changes_nothing(toy, monkeypatch):
    source = "words = {'query', 'key', 'value', 'mask'}\nprint(sorted(words), 'key' in words)"
    monkeypatch.setenv("PYTHONHASHSEED", "7")  # the user's: the kernel has its own
    result = toy.cells(source, "import os\nos.environ['PYTHONHASHSEED']")
    assert result.outputs[1][0]["data"]["text/plain"] == "'0'"
    variables = run.variables
    monkeypatch.setattr(run, "variables", lambda build: variables(build) | {"PYTHONHASHSEED": "7"})
    assert toy.cells(source).outputs == result.outputs[:1]


def test_no_more_kernels_than_cores_run(toy, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    running, most = set(), []

    def tell(page, done, total):
        (running.add if done < total else running.discard)(page.key)
        most.append(len(running))

    for name in "ab":
        toy.write(f"docs/{name}.md", f"```python\nprint('{name}')\n```\n")
    toy.run("docs/a.md", "docs/b.md", tell=tell)
    assert max(most) == 1
    assert threading.active_count() < 20
