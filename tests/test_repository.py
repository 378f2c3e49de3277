"""The repository: locks, commands, workflows, licences, what README and CONTRIBUTING promise."""

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import mktestdocs
import pytest
import yaml
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PAPERS = ["README.md", "CONTRIBUTING.md"]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def fences(name, language):
    tokens = MarkdownIt().parse(read(name))
    return [t.content for t in tokens if t.type == "fence" and t.info == language]


def pins():
    lines = [line for line in read("requirements.txt").splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def wanted():
    book = tomllib.loads(read("pyproject.toml"))
    groups = [*book["project"]["optional-dependencies"].values()]
    groups += [book["project"]["dependencies"], *book["dependency-groups"].values()]
    return [Requirement(line) for group in groups for line in group]


def tracked():
    """Return the files of the repository, those included that are not committed yet."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in names.split("\0") if name and (ROOT / name).is_file()]


def targets():
    return re.search(r"^\.PHONY: (.*)$", read("Makefile"), re.M)[1].split()


# Locks


def test_torch_is_locked_without_a_local_version():
    assert "torch==2.13.0" in read("requirements.txt").splitlines()


def test_the_lock_holds_exact_public_versions_and_nothing_else():
    for name, version in pins().items():
        assert re.fullmatch(r"[\w.-]+", name)
        assert str(Version(version).local) == "None", name
    assert not re.search(r"https?:|@|\+cpu|^-", read("requirements.txt"), re.M)


def test_the_npm_lock_names_no_registry():
    for place, entry in json.loads(read("package-lock.json"))["packages"].items():
        assert "resolved" not in entry, place
        assert not place or "integrity" in entry, place


def test_the_package_asks_for_lower_bounds():
    for requirement in wanted():
        operators = {specifier.operator for specifier in requirement.specifier}
        assert ">=" in operators and operators <= {">=", "<"}, requirement


def test_everything_needed_is_locked_and_installed_as_locked():
    locked = {canonicalize_name(name): version for name, version in pins().items()}
    todo, seen = wanted(), set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        if name in seen:
            continue
        seen.add(name)
        assert name in locked, f"{name} is needed and not in requirements.txt: make lock"
        assert requirement.specifier.contains(locked[name], prereleases=True), requirement
        package = metadata.distribution(name)
        assert Version(package.version).public == locked[name], f"{name}: make clean serve"
        for line in package.requires or []:
            needed = Requirement(line)
            if needed.name.startswith(("nvidia-", "cuda-", "triton")):
                continue  # what a torch with CUDA brings along: not in the lock
            if not needed.marker or any(needed.marker.evaluate({"extra": e}) for e in extras):
                todo.append(needed)
    assert set(locked) == seen, "locked and not needed: make lock"


def test_every_package_that_is_imported_is_asked_for():
    asked = {canonicalize_name(requirement.name) for requirement in wanted()}
    homes = metadata.packages_distributions()
    for file in (ROOT / name for name in tracked() if name.endswith(".py")):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        names = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
        names += [n.module for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
        for top in {name.split(".")[0] for name in names} & set(homes):
            found = {canonicalize_name(home) for home in homes[top]}
            assert found & asked, f"{file.name} imports {top}: add it to pyproject.toml"


# Commands


def test_ci_calls_make_and_nothing_else():
    lines = [line for line in read(".ci/run").splitlines() if line and not line.startswith("#")]
    assert lines[:2] == ["set -euo pipefail", 'cd "$(dirname "$0")/.."']
    for line in lines[2:]:
        command, *names = line.split()
        assert command == "make" and set(names) <= set(targets()), line


@pytest.mark.parametrize("paper", PAPERS)
def test_every_command_in_the_papers_is_a_target(paper):
    lines = [line for block in fences(paper, "bash") for line in block.splitlines()]
    inline = re.findall(r"`(make [a-z]+)`", read(paper))
    assert lines
    for line in [*lines, *inline]:
        command, *names = line.split()
        assert command in {"make", "export"}, line
        assert command == "export" or set(names) <= set(targets()), line


def test_make_lists_every_target_for_people():
    listed = subprocess.run(["make"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for target in set(targets()) - {"setup", "browser"}:
        assert f"  {target} " in listed


@pytest.fixture
def stand_in(tmp_path):
    """Return a function that runs make in a folder with a tiny site, and that folder."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# One\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: Stand-in\n")
    (tmp_path / "requirements.txt").touch()
    places = (".venv", "node_modules", ".cache/data")
    ready = [word for place in places for word in ("-o", f"{place}/.installed")]
    (tmp_path / ".venv").symlink_to(sys.prefix)

    def make(*names):
        command = ["make", *names, *ready]
        return subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)

    return make, tmp_path


def test_a_failed_build_leaves_the_last_good_site(stand_in):
    make, folder = stand_in
    assert make("site").returncode == 0
    (folder / "docs" / "index.md").write_text("# Two\n\n[nowhere](nowhere.md)\n")
    failed = make("site")
    assert failed.returncode != 0
    assert "nowhere.md" in failed.stderr + failed.stdout
    assert "One" in (folder / "site" / "index.html").read_text()
    assert list((folder / ".cache").iterdir()) == []


def test_an_interrupted_swap_is_mended(stand_in):
    make, folder = stand_in
    left = folder / ".cache" / "site.999999999.old"  # no process has this number
    left.mkdir(parents=True)
    (left / "index.html").write_text("the last good site")
    (folder / ".cache" / "site.999999998").mkdir()
    (folder / "docs" / "index.md").write_text("[nowhere](nowhere.md)\n")
    assert make("site").returncode != 0
    assert (folder / "site" / "index.html").read_text() == "the last good site"
    assert list((folder / ".cache").iterdir()) == []


def test_a_site_takes_the_place_of_the_last(stand_in):
    make, folder = stand_in
    assert make("site").returncode == 0
    (folder / "docs" / "index.md").write_text("# Two\n")
    (folder / "docs" / "more.md").write_text("# More\n")
    assert make("site").returncode == 0
    assert "Two" in (folder / "site" / "index.html").read_text()
    assert (folder / "site" / "more" / "index.html").exists()
    assert list((folder / ".cache").iterdir()) == []


# Workflows


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_is_pinned_modest_and_bounded(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for uses in re.findall(r"uses: (.*)", path.read_text(encoding="utf-8")):
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", uses), uses
    for name, job in workflow["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 90, name
        allowed = {"contents", "pages", "id-token"} if path.stem == "publish" else set()
        assert set(job.get("permissions", {})) <= allowed, name
        for step in job["steps"]:
            words = step.get("run", "make").split("#")[0].split()
            assert words[0] == "make", step
            assert set(words[1:]) <= {*targets(), "${{", "matrix.target", "}}"}, step
        for target in job.get("strategy", {}).get("matrix", {}).get("target", []):
            assert target in targets()


def test_workflows_work_in_any_fork():
    assert [path.stem for path in WORKFLOWS] == ["publish", "pull-request", "weekly"]
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow["env"]["REPO_URL"] == "${{ github.server_url }}/${{ github.repository }}"
        assert workflow["env"]["PIP_EXTRA_INDEX_URL"].endswith("/whl/cpu")
    site = read("mkdocs.yml")
    assert re.search(r"^site_url: !ENV \[SITE_URL,", site, re.M)
    assert re.search(r"^repo_url: !ENV \[REPO_URL,", site, re.M)
    assert "SITE_URL: ${{ steps.pages.outputs.base_url }}/" in read(".github/workflows/publish.yml")


# Papers and licences


@pytest.mark.parametrize("paper", PAPERS)
def test_listings_of_the_papers_run(paper):
    blocks = mktestdocs.grab_code_blocks(read(paper))
    assert blocks and len(blocks) == len(fences(paper, "python"))
    for block in blocks:
        exec(compile(block, paper, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("paper", PAPERS)
def test_links_of_the_papers_lead_somewhere(paper):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", read(paper)):
        assert (ROOT / target).exists(), target


def test_the_tree_in_the_readme_is_there():
    tree = next(block for block in fences("README.md", "text") if block.startswith("docs/"))
    folder = ""
    for line in tree.splitlines():
        name = line.split()[0]
        folder = folder if line.startswith(" ") else name
        assert (ROOT / (folder if line.startswith(" ") else "") / name).exists(), line


def test_both_licences_are_there_and_named():
    assert "MIT License" in read("LICENSE")
    assert read("LICENSE-text").startswith("Attribution-ShareAlike 4.0 International")
    for name in "README.md", "CONTRIBUTING.md", "mkdocs.yml":
        assert "MIT" in read(name) and "CC BY-SA 4.0" in read(name), name
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["license"] == ["MIT", "CC-BY-SA-4.0"]
    book = tomllib.loads(read("pyproject.toml"))["project"]
    assert (book["license"], book["version"]) == ("MIT", citation["version"])


def test_the_page_of_parts_lists_what_the_site_ships():
    spec = importlib.util.spec_from_file_location("parts", ROOT / "hooks" / "parts.py")
    parts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parts)
    page = parts.third_party_markdown(ROOT)
    for name in "mkdocs-material", "mkdocs", "mkdocs-jupyter", "scikit-learn":
        assert f"| {name} | {pins()[name]} | " in page
        assert f'??? note "{name}: ' in page
    for place, entry in json.loads(read("package-lock.json"))["packages"].items():
        if place:
            name = place.removeprefix("node_modules/")
            assert f"| {name} | {entry['version']} | {entry['license']} | " in page
            assert f'??? note "{name}: ' in page
    for notice in (
        "Martin Donath",
        "lunr.Index",
        "Font Awesome",
        "SIL OPEN FONT LICENSE",
        "CC BY 4.0",
    ):
        assert notice in page


def test_no_path_of_a_machine_and_no_host_of_a_registry():
    hosts = rb"pypi\.(org|python)|python[h]osted\.|registry\.npm|deb\.debian\.org"
    private = re.compile(rb"/(work|root|tmp)/\w|" + hosts)
    for name in tracked():
        found = private.search((ROOT / name).read_bytes())
        assert not found, f"{name}: {found[0]}"


def test_nothing_made_or_foreign_is_committed():
    for name in tracked():
        assert not name.endswith((".ipynb", ".html", ".woff2", ".png", ".min.js", ".min.css")), name
        assert not name.startswith(("site/", "node_modules/", ".venv/", ".cache/")), name
