"""The order of the repository: partners of a section, regions, imports, budgets."""

import ast
import re
import subprocess
import sys

import pytest
import yaml
from book_files import FURTHER, INCLUDE, PLAN, ROOT, SECTIONS, SOLUTIONS, body, cells, prose

MODULES = {key: key.replace("-", "_") for key in PLAN}
SHARED = ("plotting", "datasets", "training")
FILES = sorted((ROOT / "snippets").glob("*.py"))
MACHINERY = sorted((ROOT / "hooks").rglob("*.*"))
EVERYWHERE = {"torch", "numpy", "matplotlib", "snippets"} | set(sys.stdlib_module_names)
ON_REQUEST = {
    "sklearn": "scikit-learn",
    "num2words": "num2words",
    "sacrebleu": "sacrebleu",
    "scipy": "scipy",
}
TOP_LEVEL = {
    *(".ci", ".github", ".gitignore", ".npmrc", "CITATION.cff", "CONTRIBUTING.md", "LICENSE"),
    *("LICENSE-text", "Makefile", "README.md", "docs", "hooks", "mkdocs.yml", "package-lock.json"),
    *("package.json", "pyproject.toml", "requirements.txt", "snippets", "tests"),
}


def tracked():
    """Return the files of the repository, with those that are not committed yet."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in names.split("\0") if (ROOT / name).is_file()]


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(node):
    """Return the full names of the modules that code imports, wherever the statement stands."""
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            found |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "write imports in full"
            plain = child.module == "snippets"
            found |= {f"snippets.{a.name}" for a in child.names} if plain else {child.module}
    return found


def nav():
    """Return the pages of the navigation in order."""

    class Loader(yaml.SafeLoader):
        """Read mkdocs.yml, whose own tags do not matter here."""

    Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
    entries = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
    return [leaf for entry in entries for leaf in leaves(entry)]


def leaves(entry):
    if isinstance(entry, str):
        return [entry]
    below = entry.values() if isinstance(entry, dict) else entry
    return [leaf for part in below for leaf in leaves(part)]


# Sections and their partners


def test_the_first_sections_are_written_without_a_gap():
    assert len(SECTIONS) >= 3
    assert list(PLAN[: len(SECTIONS)]) == SECTIONS


@pytest.mark.parametrize("key", SECTIONS)
def test_every_section_has_its_partners(key):
    name = MODULES[key]
    for partner in (
        f"docs/solutions/{key}.py",
        f"snippets/{name}.py",
        f"tests/snippets/test_{name}.py",
    ):
        assert (ROOT / partner).is_file(), f"docs/{key}.md has no {partner}"


def test_every_partner_has_its_section():
    keys = {name: key for key, name in MODULES.items()} | FURTHER
    names = {path.stem for path in FILES} - {"__init__", *SHARED}
    assert {keys.get(name) for name in names} == set(SECTIONS)
    assert set(SOLUTIONS) == set(SECTIONS)
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests/snippets").glob("test_*")}
    assert tests >= names
    assert all(test.startswith((*names, *SHARED)) for test in tests)


def test_the_navigation_has_every_section_and_its_solutions_in_order():
    pages = nav()
    assert pages[0] == "index.md"
    assert [page for page in pages if page.removesuffix(".md") in PLAN] == [
        f"{key}.md" for key in SECTIONS
    ]
    assert [page for page in pages if page.startswith("solutions/")] == [
        f"solutions/{key}.ipynb" for key in SECTIONS
    ]


# Regions


def regions(path):
    """Return the name and the code of each region of a file."""
    pattern = r"^# --8<-- \[start:([\w-]+)\]\n(.*?)^# --8<-- \[end:\1\]"
    text = path.read_text(encoding="utf-8")
    found = re.findall(pattern, text, re.M | re.S)
    assert text.count("--8<--") == 2 * len(found), f"{path.name}: a mark without its partner"
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_region_is_one_definition_and_bears_its_name(path):
    for name, code in regions(path):
        kinds = ast.FunctionDef | ast.ClassDef
        whole = ast.parse(code).body
        assert len(whole) == 1 and isinstance(whole[0], kinds) and whole[0].name == name, name


@pytest.mark.parametrize("name", [*map(MODULES.get, SECTIONS), *FURTHER])
def test_every_definition_of_a_section_is_shown_or_imported(name):
    """What a page does not show, it imports, or something else in the module uses it."""
    path = ROOT / "snippets" / f"{name}.py"
    key = FURTHER.get(name) or name.replace("_", "-")
    kinds = ast.FunctionDef | ast.ClassDef
    defined = {node.name: node for node in tree(path).body if isinstance(node, kinds)}
    shown = [name for name, _ in regions(path)]
    assert shown == [name for name in defined if name in shown]
    used = {alias.name for cell in cells(key) for alias in aliases(cell.source, f"snippets.{name}")}
    for other in tree(path).body:
        names = {node.id for node in ast.walk(other) if isinstance(node, ast.Name)}
        used |= names - {getattr(other, "name", None)}
    assert set(defined) <= used | set(shown)


def aliases(source, module):
    """Return the names that code imports from a module."""
    statements = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    return [alias for node in statements if node.module == module for alias in node.names]


def test_every_region_is_shown_and_every_shown_region_is_there():
    there = {(f"snippets/{path.name}", name) for path in FILES for name, _ in regions(path)}
    shown = {pair for key in ["index", *SECTIONS] for pair in INCLUDE.findall(body(key))}
    assert shown == there


@pytest.mark.parametrize("key", SECTIONS)
def test_a_page_shows_the_regions_of_its_own_module(key):
    for file, name in INCLUDE.findall(body(key)):
        module = file.split("/")[1].removesuffix(".py")
        assert FURTHER.get(module) == key or module in {MODULES[key], *SHARED}, name


# Imports


@pytest.mark.parametrize("module", [*map(MODULES.get, SECTIONS), *FURTHER])
def test_a_module_imports_earlier_sections_and_shared_code_only(module):
    """A further module of a section also imports the section's others."""
    key = FURTHER.get(module)
    sections = list(MODULES.values())
    earlier = sections[: sections.index(MODULES[key]) + 1 if key else sections.index(module)]
    earlier += [name for name in FURTHER if FURTHER[name] == key]
    allowed = {f"snippets.{name}" for name in [*earlier, *SHARED]}
    for name in imported(tree(ROOT / "snippets" / f"{module}.py")):
        if name.startswith("snippets"):
            assert name.rpartition(".")[0] in allowed or name in allowed, name
        else:
            assert name.split(".")[0] in EVERYWHERE | set(ON_REQUEST), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shared_code_imports_no_section(path):
    names = imported(tree(path))
    if path.stem in SHARED:
        assert not [n for n in names if n.startswith("snippets") and n.split(".")[1] not in SHARED]
    assert {name.split(".")[0] for name in names} <= EVERYWHERE | set(ON_REQUEST)


@pytest.mark.parametrize("key", ["index", "notation", *SECTIONS])
def test_a_page_imports_only_what_every_reader_has_or_what_it_asks_for(key):
    need = re.search(r'^!!! info "You need"\n\n((?:    .*\n|\n)+)', prose(key), re.M)
    asked = {name for name, package in ON_REQUEST.items() if need and package in need[1]}
    solutions = [f"solutions/{key}"] if key in SOLUTIONS else []
    for page in [key, *solutions]:
        for cell in cells(page):
            names = {name.split(".")[0] for name in imported(ast.parse(cell.source))}
            assert names <= EVERYWHERE | asked, f"{page}, line {cell.line}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_snippet_is_bound_to_one_device(path):
    assert not re.search(r"\.cuda\(|[\"']cuda[\"']", path.read_text(encoding="utf-8"))


# Budgets


def test_the_machinery_can_be_read_in_one_sitting():
    lines = {path.name: path.read_text(encoding="utf-8").count("\n") for path in code_files()}
    assert len(lines) <= 8, sorted(lines)
    assert sum(lines.values()) <= 2_080, lines


def code_files():
    """Return the files of the machinery; the exporter of live figures is counted apart."""
    made = [path for path in MACHINERY if "__pycache__" not in path.parts]
    return [path for path in made if not path.stem.startswith("live")]


def test_no_function_of_the_machinery_is_long():
    for path in code_files():
        if path.suffix == ".py":
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.FunctionDef):
                    length = node.end_lineno - node.lineno + 1
                    assert length <= 40, f"{path.name}: {node.name} has {length} lines"


def test_the_machinery_has_no_classes_but_records():
    """A class of a library may be extended where the library asks for that."""
    trees = [tree(path) for path in code_files() if path.suffix == ".py"]
    made = [node for whole in trees for node in ast.walk(whole) if isinstance(node, ast.ClassDef)]
    own = {node.name for node in made if "BookError" not in node.name}
    for node in made:
        bases = {ast.unparse(base) for base in node.bases}
        assert bases and not bases & own, f"line {node.lineno}: {node.name}"


# Files


def test_the_top_level_holds_what_the_readme_tells_and_no_more():
    assert {name.split("/")[0] for name in tracked()} == TOP_LEVEL


def test_nothing_that_is_made_or_that_others_made_is_committed():
    own = {".md", ".py", ".bib", ".css", ".js", ".svg"}
    for name in tracked():
        if name.startswith("docs/"):
            assert (ROOT / name).suffix in own and ".min." not in name, name
        assert (ROOT / name).stat().st_size < 200_000, name
