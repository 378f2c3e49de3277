"""Whatever is wrong stops the build with its place: one fault a test, then a build that passes."""

import shutil
import subprocess
import sys

import pytest
from toy import ROOT, Toy

from hooks import run
from hooks.expand import BookError, read_markdown, read_percent

SNIPPET = """
    import warnings

    # --8<-- [start:half]
    def half(x):
        return x / 2
    # --8<-- [end:half]

    # --8<-- [start:inverse]
    def inverse(x):

        return 1 / x
    # --8<-- [end:inverse]

    # --8<-- [start:open]
    def never(x):
        return x

    # --8<-- [start:twice]
    # --8<-- [end:twice]
    # --8<-- [start:twice]
    # --8<-- [end:twice]

    # --8<-- [start:outer]
    # --8<-- [start:inner]
    1
    # --8<-- [end:inner]
    # --8<-- [end:outer]

    # --8<-- [start:invalid]
    def invalid(x):
        return x +
    # --8<-- [end:invalid]
"""


@pytest.fixture
def toy(tmp_path):
    """Return an empty book with one module, which cannot be imported."""
    book = Toy(tmp_path)
    book.write("snippets/part.py", SNIPPET)
    return book


# Faults that reading a page finds: nothing runs


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("~~~python\n1\n~~~", 1, "write ```python at the left margin"),
        ("````python\n1\n````", 1, "write ```python at the left margin"),
        ("``` python\n1\n```", 1, "write ```python at the left margin"),
        ("```python \n1\n```", 1, "write ```python at the left margin"),
        ('```python title="x"\n1\n```', 1, "write ```python at the left margin"),
        ('```python hl_lines="1"\n1\n```', 1, "write ```python at the left margin"),
        ("```{.python}\n1\n```", 1, "write ```python at the left margin"),
        ("```{python}\n1\n```", 1, "write ```python at the left margin"),
        ("```Python\n1\n```", 1, "write ```python at the left margin"),
        ("```python3\n1\n```", 1, "write ```python at the left margin"),
        ("```pycon\n>>> 1\n```", 1, "write ```python at the left margin"),
        ("```ipython\n1\n```", 1, "write ```python at the left margin"),
        ("!!! note\n\n    ```python\n    1\n    ```", 3, "write ```python at the left margin"),
        ('=== "Tab"\n\n\t```python\n\t1\n\t```', 3, "write ```python at the left margin"),
        ("* ```python\n  1\n  ```", 1, "lines of their own"),
        ("> ```python\n> 1\n> ```", 1, "lines of their own"),
        ("Text ```code``` text", 1, "lines of their own"),
        ("Text.\n\n```python\n1", 3, "never closed"),
        ("```text\nwords", 1, "never closed"),
        ("```text\n```python\n1\n```\n```", 2, "a fence inside that of line 1"),
        ("````text\n```\n````", 2, "a fence inside that of line 1"),
        ("~~~text\n```\n~~~", 2, "a fence inside that of line 1"),
        ("```python\n1\n\n```python\n2\n```", 4, "unless that one is not closed"),
        ("```python\n1\n ```\n", 3, "a fence inside"),
        ('```python\ns = """\n```\n"""\n```', 2, "SyntaxError"),
        ("```python\n\n```", 1, "this cell is empty"),
        ("```python\n#| echo: false\n```", 1, "this cell is empty"),
        ("```python\n#| colour: red\n1\n```", 2, "'colour'"),
        ("```python\n#| echo: false\n#| echo: true\n1\n```", 3, "each once: 'echo'"),
        ("```python\n#| echo: 3\n1\n```", 2, "echo cannot be 3"),
        ("```python\n#| echo: 'no'\n1\n```", 2, "echo cannot be 'no'"),
        ("```python\n#| cache: true\n#| caption: 5\n1\n```", 3, "caption cannot be 5"),
        ("```python\n#| raises:\n1\n```", 2, "raises cannot be None"),
        ("```python\n#| alt: ''\n1\n```", 2, "alt cannot be ''"),
        ("```python\n#| timeout: 0\n1\n```", 2, "timeout cannot be 0"),
        ("```python\n#| timeout: -1\n1\n```", 2, "timeout cannot be -1"),
        ("```python\n#| timeout: true\n1\n```", 2, "timeout cannot be True"),
        ("```python\n#| caption: a: b\n1\n```", 2, "write `#| name: value`"),
        ("```python\n#| echo: false\n#| alt: @fig-x\n1\n```", 3, "write `#| name: value`"),
        ("```python\n#| echo false\n1\n```", 2, "write `#| name: value`"),
        ("```python\n#| - echo\n1\n```", 2, "write `#| name: value`"),
        ("```python\n#| caption: Model #1\n1\n```", 2, "# starts a comment"),
        ("```python\n#| caption: Up to `{python} x`\n1\n```", 2, "{python} cannot stand in it"),
        ("```python\n1\n#| echo: false\n```", 3, "options come first"),
        ("```python\n\n#| echo: false\n1\n```", 3, "options come first"),
        ("```python\n#| label: figure-x\n#| caption: x\n1\n```", 2, "not 'figure-x'"),
        ("```python\n#| label: fig-X\n#| caption: x\n1\n```", 2, "not 'fig-X'"),
        ("```python\n#| label: fig-\n#| caption: x\n1\n```", 2, "not 'fig-'"),
        ("```python\n#| label: fig-x\n1\n```", 2, "fig-x has no caption"),
        ("```python\nx = 1\nx +\n```", 3, "SyntaxError: invalid syntax"),
        ("```python\nif x:\ny = 1\n```", 3, "IndentationError"),
        ("```python\n%matplotlib inline\n```", 2, "SyntaxError"),
        ("```python\n1\n!ls\n```", 3, "SyntaxError"),
        ("```python\nprint?\n```", 2, "SyntaxError"),
        ("```python\nawait x\n```", 2, "SyntaxError: 'await' outside function"),
        ("```python\nreturn 1\n```", 2, "SyntaxError: 'return' outside function"),
        ('```python\nx = 1\ns = "\\d"\n```', 3, "invalid escape sequence"),
        ("```python\nx = 1\nx is 1\n```", 3, '"is" with a literal'),
        ("```python\nif 1:\n\tx = 1\n        y = 2\n```", 4, "TabError"),
        ("Text\n`{python} 1 +` text", 2, "SyntaxError"),
        ("Text\n`{python} x = 1` text", 2, "SyntaxError"),
        ("Text\n`{python}` text", 2, "SyntaxError"),
        ("Text\n`{python} await x` text", 2, "SyntaxError"),
        ('```python\n\n--8<-- "snippets/none.py:half"\n```', 3, "no file snippets/none.py"),
        ('```python\n--8<-- "../part.py"\n```', 2, "no file ../part.py"),
        ('```python\n--8<-- "/etc/hostname"\n```', 2, "no file /etc/hostname"),
        ('```python\n--8<-- "snippets"\n```', 2, "no file snippets"),
        ('```python\n--8<-- "snippets/part.py:none"\n```', 2, "has no region 'none'"),
        ('```python\n--8<-- "snippets/part.py:twice"\n```', 2, "starts once and ends once"),
        ('```python\n--8<-- "snippets/part.py:open"\n```', 2, "starts once and ends once"),
        ('```python\n--8<-- "snippets/part.py:outer"\n```', 2, "holds another region"),
        ('```python\n--8<-- "snippets/part.py"\n```', 2, "holds another region"),
        ('```py\n--8<-- "snippets/part.py:none"\n```', 2, "has no region 'none'"),
        ("```python\n--8<-- snippets/part.py:half\n```", 2, "an include is written"),
        ('```python\n  --8<-- "snippets/part.py:half"\n```', 2, "an include is written"),
        ('Text\n--8<-- "snippets/part.py:half"', 2, "lines of their own"),
        ("Text\x0cand\u2028more\n```pycon\n```", 2, "write ```python"),
    ],
)
def test_a_page_that_cannot_be_read(toy, text, line, message):
    with pytest.raises(BookError) as caught:
        read_markdown(text + "\n", "docs/page.md", toy.root)
    first = str(caught.value).split("\n")[0]
    assert first.startswith(f"docs/page.md:{line}: ")
    assert message in first


def test_a_syntax_error_in_a_region_is_found_in_its_file(toy):
    text = '```python\nx = 1\n--8<-- "snippets/part.py:invalid"\n```\n'
    with pytest.raises(BookError, match=r"^snippets/part\.py:31: SyntaxError: invalid syntax"):
        read_markdown(text, "docs/page.md", toy.root)


def test_a_module_that_is_not_utf8_is_named(toy):
    (toy.root / "snippets/part.py").write_bytes(b"# caf\xe9\n")
    with pytest.raises(BookError, match=r"^snippets/part\.py:1: this is not UTF-8"):
        read_markdown('```python\n--8<-- "snippets/part.py"\n```', "docs/page.md", toy.root)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("x = 1\n\n# %%\ny = 2\n", 1, "all stands below # %%"),
        ("# %% [markdown]\n# Text\n#\n# ```python\n# 1\n# ```\n", 4, "code in a text cell"),
        ("# %% [markdown]\n# Text\n\n# %%\n\n#| echo: 3\nx = 1\n", 6, "echo cannot be 3"),
        ("# %%\nx = 1\n\n# %%\n\n\nx +\n", 7, "SyntaxError"),
        ("# %% [markdown]\n#\n# Text\n# `{python} 1 +`\n", 4, "SyntaxError"),
        ('# %% [markdown]\n"""\nText\n`{python} 1 +`\n"""\n', 4, "SyntaxError"),
        ('# %%\n"""\n# %% no cell\n"""\nx +\n', 1, "all stands below # %%"),
    ],
)
def test_solutions_that_cannot_be_read(toy, text, line, message):
    with pytest.raises(BookError) as caught:
        read_percent(text, "docs/solutions/page.py", toy.root)
    first = str(caught.value).split("\n")[0]
    assert first.startswith(f"docs/solutions/page.py:{line}: ")
    assert message in first


# Faults that running a page finds. Cells begin at line 3, their code at line 4.


@pytest.mark.parametrize(
    ("source", "place", "message"),
    [
        ("x = 1\n1 / 0", "docs/page.md:5", "ZeroDivisionError: division by zero"),
        ("print(wdth)", "docs/page.md:4", "NameError: name 'wdth' is not defined"),
        (
            '--8<-- "snippets/part.py:inverse"\n\ninverse(0)',
            "snippets/part.py:11",
            "ZeroDivisionError",
        ),
        ("import snippets.bad", "snippets/bad.py:3", "NameError"),
        ("import snippets.worse", "snippets/worse.py:2", "SyntaxError"),
        ("import json\njson.loads('{')", "docs/page.md:5", "JSONDecodeError"),
        (
            "def f():\n    1 / 0\n\nlist(map(lambda _: f(), [1]))",
            "docs/page.md:5",
            "ZeroDivisionError",
        ),
        ("exec('1 / 0')", "docs/page.md:4", "ZeroDivisionError"),
        ("assert 1 == 2", "docs/page.md:4", "AssertionError"),
        ("raise ValueError('one\\ntwo')", "docs/page.md:4", "ValueError: one"),
        ("raise SystemExit(3)", "docs/page.md:4", "SystemExit: 3"),
        ("exit()", "docs/page.md:4", "NameError: name 'exit' is not defined"),
        ("raise KeyboardInterrupt", "docs/page.md:4", "KeyboardInterrupt"),
        ("input()", "docs/page.md:4", "StdinNotImplementedError"),
        ("def f():\n    f()\nf()", "docs/page.md:5", "RecursionError"),
        ("`{python} 1 / 0`", "docs/page.md:3", "ZeroDivisionError: division by zero"),
        ("#| raises: ValueError\nint('3')", "docs/page.md:3", "the cell did not raise ValueError"),
        ("#| raises: KeyError\n1 / 0", "docs/page.md:5", "ZeroDivisionError"),
        ("#| raises: ArithmeticError\n1 / 0", "docs/page.md:5", "ZeroDivisionError"),
        ("import sys\nprint('oh', file=sys.stderr)", "docs/page.md:3", "wrote to stderr: oh"),
        (
            "import warnings\nwarnings.warn('no')",
            "docs/page.md:3",
            "stderr: <cell 1>:2: UserWarning: no",
        ),
        ("import snippets.warns", "docs/page.md:3", "snippets/warns.py:2: UserWarning: no"),
        ("import os\nos.system('echo oh >&2')", "docs/page.md:3", "the cell wrote to stderr: oh"),
        (
            "#| timeout: 1\nwhile True:\n    pass",
            "docs/page.md:3",
            "longer than its limit of 1 seconds",
        ),
        (
            "#| timeout: 1\nimport time\ntime.sleep(60)",
            "docs/page.md:3",
            "longer than its limit of 1",
        ),
        ("import os\nos._exit(1)", "docs/page.md:3", "the kernel failed in this cell: Kernel died"),
        ("print(object())", "docs/page.md:3", "an address of memory changes with every run"),
        ("print('\\x1b[1mbold')", "docs/page.md:3", "control characters"),
        ("print('50%\\r100%')", "docs/page.md:3", "control characters"),
        ("print('x' * 20_001)", "docs/page.md:3", "more than 20,000 characters"),
    ],
)
def test_a_page_that_cannot_be_run(toy, source, place, message):
    toy.write("snippets/bad.py", "x = 1\n\ny = wdth\n")
    toy.write("snippets/worse.py", "x = 1\ny = (\n")
    toy.write("snippets/warns.py", "import warnings\nwarnings.warn('no')\n")
    with pytest.raises(BookError) as caught:
        toy.cells(source)
    first, *rest = str(caught.value).split("\n")
    assert first.startswith(f"{place}: ")
    assert message in first
    assert source.split("\n")[-1].strip("`").removeprefix("{python} ") in rest
    assert not list(toy.runs.glob("*.json"))


def test_stderr_that_comes_late_is_not_lost(toy):
    late = """
        import sys, threading, time
        threading.Timer(0.2, lambda: print("late", file=sys.stderr)).start()
    """
    with pytest.raises(BookError, match=r"^docs/page\.md:8: the cell wrote to stderr: late"):
        toy.cells(late, "time.sleep(0.5)")


def test_an_error_on_one_page_ends_the_others(toy):
    toy.write("docs/long.md", "```python\nimport time\ntime.sleep(50)\n```\n")
    toy.write("docs/short.md", "```python\nimport time\ntime.sleep(1)\n1 / 0\n```\n")
    with pytest.raises(BookError, match=r"^docs/short\.md:4: ZeroDivisionError"):
        toy.run("docs/long.md", "docs/short.md")


def test_the_default_time_limit_is_named(toy, monkeypatch):
    monkeypatch.setattr(run, "TIME_LIMIT", 1)
    with pytest.raises(BookError, match="its limit of 1 seconds"):
        toy.cells("import time\ntime.sleep(30)")


# What is unusual, yet right


def test_unusual_cells_work(toy):
    result = toy.cells(
        "class Odd(Exception):\n    pass\n\n#  only a comment",
        "#| raises: Odd\nraise Odd('mine')",
        "# a comment",
        "5;",
        "grösse = '<b>&amp; | *'\nprint(grösse)",
        "#| stderr: true\nimport sys\nprint('oh', file=sys.stderr)",
        "def print(*values):\n    raise ValueError\nstr = book = 3",
        "Is `{python} grösse`, `{python} 1, 2`, `{python} round(1 / 3, 2) # why`, ``{python} no``.",
        "import os\nos.system('echo from a process');",
        "os.chdir('/')\nos.environ['PATH'] = ''\nsys.path.clear()",
        "`{python} os.getcwd()`",
        "import functools\n@functools.cache\ndef f(): return 1\nf()",
        "#| raises: ValueError\nraise ValueError",
        "import sys; sys.stdout.write('no end')\nNone",
        "import time\nfor i in '012':\n    time.sleep(0.25)\n    sys.stdout.write(f'{i}\\n');",
        "a: int = 3\nmatch a:\n    case 3:\n        pass\n",
    )
    texts = ["".join(o.get("text", o.get("evalue", "")) for o in out) for out in result.outputs]
    assert texts[:6] == ["", "mine", "", "", "<b>&amp; | *\n", "oh\n"]
    assert texts[7:12] == ["<b>&amp; | *", "(1, 2)", "0.33", "from a process\n", ""]
    assert texts[12:] == ["/", "", "", "no end", "0\n1\n2\n", ""]
    assert [len(out) for out in result.outputs][16] == 1  # one stream is one output


def test_windows_line_ends_and_a_byte_order_mark_are_read(toy):
    code = "\ufeff# --8<-- [start:one]\r\ndef one():\r\n    return 1 / 0\r\n# --8<-- [end:one]\r\n"
    (toy.root / "snippets/windows.py").write_bytes(code.encode())
    with pytest.raises(BookError, match=r"^snippets/windows\.py:3: ZeroDivisionError"):
        toy.cells('--8<-- "snippets/windows.py:one"\none()')


def test_pictures_come_as_vectors(toy):
    result = toy.cells(
        "import matplotlib.pyplot as plt\nplt.plot([1, 2]);",
        "figure, axes = plt.subplots()\naxes.plot([2, 1])\nplt.close(figure)\nfigure",
        "from IPython.display import display\ndisplay(figure)\ndisplay(figure)",
    )
    kinds = [[sorted(output["data"]) for output in outputs] for outputs in result.outputs]
    assert kinds == [[["image/svg+xml", "text/plain"]] * count for count in (1, 1, 2)]


# Faults that only the whole book shows


INDEX = """
    ---
    execute: true
    ---
    # Toy

    First prose, see [the other](other.md#more), @sec-other and @fig-line.

    ```python
    print(1)
    ```

    $$
    x = 1
    $$ {#eq-one}

    It is @eq-one [@vaswani2017].
"""
OTHER = """
    ---
    execute: true
    ---
    # Other

    Other prose.

    ```python
    import matplotlib.pyplot as plt
    ```

    ```python
    #| label: fig-line
    #| caption: A line.
    #| alt: A black line that rises from the left to the right.
    figure, axes = plt.subplots()
    axes.plot([1, 2], color="#000000")
    plt.close(figure)
    figure
    ```

    ## More

    Last prose.
"""
SOLUTIONS = """
    # %% [markdown]
    # # Solutions: Other
    #
    # Solved prose [in the text](../other.md#more).

    # %%
    print("solved")
"""
WORKS = """
    @inproceedings{vaswani2017,
      author = {Vaswani, Ashish and Shazeer, Noam},
      title = {Attention is all you need},
      booktitle = {Advances in Neural Information Processing Systems},
      year = {2017},
    }
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a small book that has been built."""
    toy = Toy(tmp_path_factory.mktemp("built"))
    toy.config("index.md", "other.md", "solutions/other.ipynb", "references.md", "third-party.md")
    toy.write("snippets/__init__.py", "")
    toy.write("docs/index.md", INDEX)
    toy.write("docs/other.md", OTHER)
    toy.write("docs/solutions/other.py", SOLUTIONS)
    toy.write("docs/references.md", "# References\n\n<!-- references -->\n")
    toy.write("docs/references.bib", WORKS)
    shutil.copytree(ROOT / "docs/assets", toy.root / "docs/assets")
    code, _, errors = toy.build()
    assert code == 0, errors
    return toy


@pytest.fixture
def book(built, tmp_path):
    """Return a copy of that book, with its cache."""
    return Toy(tmp_path / "copy", like=built)


PROSE = ("docs/index.md", "First prose")
FIGURE = ("docs/other.md", "#| alt: A black line that rises from the left to the right.")
IMAGE = "axes.imshow([[i * j % 7 for i in range(80)] for j in range(80)], cmap='gray')"


@pytest.mark.parametrize(
    ("file", "old", "new", "place", "message"),
    [
        (*PROSE, "@fig-none", "docs/index.md:6", "no label 'fig-none'"),
        (*PROSE, "[@nobody1999]\nand", "docs/index.md:6", "no work 'nobody1999'"),
        (*PROSE, "[@vaswani2017]\nand\n@eq-two", "docs/index.md:8", "no label 'eq-two'"),
        (*PROSE, "\n\n$\\frac{1}$", "docs/index.md:8", "\\frac"),
        (*PROSE, "$$\nx = 1\n\nwith", "docs/index.md:6", "$$ is never closed"),
        (*PROSE, "$$\nx\n$$ {#eq-one}\n\n", "docs/index.md:18", "the label eq-one"),
        (*PROSE, "`{python} 1 / 0`", "docs/index.md:6", "ZeroDivisionError"),
        ("docs/other.md", "fig-line", "tbl-line", "docs/index.md:6", "no label 'fig-line'"),
        (
            "docs/index.md",
            "print(1)",
            "#| label: fig-line\n#| caption: x\n1",
            "docs/other.md",
            "fig-line",
        ),
        (
            "docs/index.md",
            "print(1)",
            "#| label: fig-b\n#| caption: x\n1",
            "docs/index.md:8",
            "fig-b",
        ),
        (*FIGURE, "#| alt: A line.", "docs/other.md:12", "alt"),
        ("docs/other.md", "figure\n", "figure, axes\n", "docs/other.md:12", "fig-line"),
        (
            "docs/other.md",
            'axes.plot([1, 2], color="#000000")',
            IMAGE,
            "docs/other.md:12",
            "raster",
        ),
        ("docs/other.md", '"#000000"', '"#123456"', "docs/other.md:12", "#123456"),
        ("docs/other.md", "A line.", "A line, @fig-no.", "docs/other.md:12", "no label 'fig-no'"),
        (
            "docs/other.md",
            "execute: true",
            "title: Other",
            "docs/other.md:8",
            "without `execute: true`",
        ),
        (
            "docs/solutions/other.py",
            "Solved",
            "@eq-no",
            "docs/solutions/other.py:4",
            "no label 'eq-no'",
        ),
        ("docs/solutions/other.py", '"solved"', "wdth", "docs/solutions/other.py:7", "NameError"),
        ("docs/references.bib", "year", "year year", "docs/references.bib:5", "syntax error"),
        ("docs/index.md", "print(1)", "print(2)\nprint(wdth)", "docs/index.md:10", "NameError"),
    ],
)
def test_a_book_that_cannot_be_built(book, file, old, new, place, message):
    book.edit(file, old, new)
    code, _, errors = book.build()
    assert code == 1
    told = [row for row in errors.split("\n") if row.startswith("docs/")]
    assert len(told) == 1
    assert told[0].startswith(place)
    assert message in told[0]
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (*PROSE, "[a link](nowhere.md)", "nowhere"),
        (*PROSE, "[a link](other.md#nowhere)", "#nowhere"),
        (*PROSE, "[a link](#nowhere)", "#nowhere"),
        (*PROSE, "[a link](/other/)", "/other/"),
        ("docs/solutions/other.py", "other.md#more", "nowhere.md", "nowhere"),
        ("mkdocs.yml", "- other.md", "- other.md\n- nowhere.md", "nowhere.md"),
        ("mkdocs.yml", "- references.md\n", "", "references.md"),
    ],
)
def test_links_that_lead_nowhere(book, file, old, new, message):
    book.edit(file, old, new)
    code, _, errors = book.build()
    assert code == 1
    assert message in errors


def test_a_page_that_is_not_utf8(book):
    (book.root / "docs/other.md").write_bytes(b"# Other\n\nCaf\xe9\n")
    code, _, errors = book.build()
    assert code == 1
    assert "docs/other.md:3: this is not UTF-8" in errors


def test_nothing_wrong_builds_from_the_cache(book):
    code, out, errors = book.build()
    assert (code, "WARNING" in errors) == (0, False)
    text = (book.root / "site/index.html").read_text(encoding="utf-8")
    assert "Figure&nbsp;1.1" in text


def test_the_last_good_site_stays(book):
    """`make site` puts a site in place only after a build that succeeds."""
    shutil.copy(ROOT / "Makefile", book.root)

    def make(command):
        return subprocess.run(command, cwd=book.root, check=False, capture_output=True, text=True)

    venv = sys.executable.rsplit("/", 2)[0]
    command = ["make", "-o", "setup", f"VENV={venv}", "site"]
    (book.root / "site/mark.txt").write_text("good")
    book.edit(*PROSE, "@fig-none")
    failed = make(command)
    assert failed.returncode != 0
    assert "\ndocs/index.md:6: there is no label 'fig-none'\n" in failed.stderr
    assert (book.root / "site/mark.txt").read_text() == "good"
    book.edit("docs/index.md", "@fig-none", "@fig-line")
    done = make(command)
    assert done.returncode == 0, done.stderr
    assert not (book.root / "site/mark.txt").exists()
    assert (book.root / "site/index.html").exists()
