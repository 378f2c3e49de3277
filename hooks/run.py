"""Run the cells of pages in kernels, once; keep what they gave.

An entry of the run cache answers for the first n cells of a page. Its key is
the text of these cells, this executor's source and all package versions; it
holds the files that the run read, with their hashes, and is used only while
every one of them is unchanged. An entry that ends at a `#| cache: true` cell
has a snapshot of the page's state beside it, from which a run goes on.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat.v4 import new_code_cell, new_notebook

from hooks.expand import BookError, Cell, Inline
from hooks.kernel import digest


FOLDER = Path(".cache", "book")  # below the root
TIME_LIMIT = 60  # seconds a cell, unless it says otherwise
SIZE_LIMIT = 4e9  # bytes of the run cache
KERNEL = Path(__file__).with_name("kernel.py")
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


class Run(NamedTuple):
    """What the cells of a page gave: for each cell, its outputs and seconds."""

    outputs: list
    seconds: list
    files: dict  # read by the run: path → hash
    kept: int  # cells whose results came from the cache


def environment():
    """Return what every run depends on besides its own cells."""
    packages = sorted(f"{d.name}=={d.version}" for d in importlib.metadata.distributions())
    source = [Path(__file__).read_text(), KERNEL.read_text()]
    return hashlib.sha256(json.dumps([sys.version, packages, source]).encode()).hexdigest()


def code_key(cells, world):
    """Return the key of a run of these cells."""
    options = ("raises", "stderr", "cache")
    parts = [[type(c).__name__, c.source, *(getattr(c, "options", {}).get(o) for o in options)] for c in cells]
    return hashlib.sha256(json.dumps([world, parts]).encode()).hexdigest()[:24]


def lookup(root, cells, world):
    """Return the longest entry that is still true, as (cells, entry), or (0, None)."""
    ends = [len(cells)] + [i + 1 for i in reversed(range(len(cells))) if keeps(cells[i])]
    for end in ends:
        for path in (root / FOLDER / "runs").glob(f"{code_key(cells[:end], world)}-*.json"):
            entry = read_entry(path)
            if entry and all(digest(root / name) == then for name, then in entry["files"].items()):
                snapshot = path.with_suffix(".state")
                if end == len(cells) or file_hash(snapshot) == entry["state"]:
                    for used in (path, snapshot):
                        used.exists() and os.utime(used)  # the oldest go first
                    return end, {**entry, "snapshot": snapshot}
    return 0, None


def keeps(cell):
    """Tell whether the state after the cell is kept."""
    return isinstance(cell, Cell) and cell.options.get("cache", False)


def file_hash(path):
    """Return the hash of a file's bytes, or None if there is no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def read_entry(path):
    """Return an entry of the cache, or None if it is damaged."""
    try:
        check, _, text = path.read_text(encoding="utf-8").partition("\n")
        return json.loads(text) if hashlib.sha256(text.encode()).hexdigest() == check else None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return None


def store(root, cells, world, run, state=None):
    """Write an entry, and the snapshot that the temporary file `state` holds."""
    names = hashlib.sha256(json.dumps(sorted(run.files.items())).encode()).hexdigest()[:16]
    path = root / FOLDER / "runs" / f"{code_key(cells, world)}-{names}.json"
    entry = {"outputs": run.outputs, "seconds": run.seconds, "files": run.files}
    entry["state"] = state and file_hash(state)
    text = json.dumps(entry)
    check = hashlib.sha256(text.encode()).hexdigest()
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(f"{check}\n{text}")
    if state:
        os.replace(state, path.with_suffix(".state"))
    os.replace(file.name, path)


def trim(root):
    """Remove the oldest entries while the cache is too large."""
    paths = [p for p in (root / FOLDER / "runs").iterdir() if p.is_file()]
    total = sum(p.stat().st_size for p in paths)
    for path in sorted(paths, key=lambda p: p.stat().st_mtime):
        if total <= SIZE_LIMIT:
            break
        total -= path.stat().st_size
        path.unlink(missing_ok=True)


def run_pages(root, pages, tell):
    """Run pages side by side, longest first; return {key: Run}."""
    root = Path(root).resolve()
    (root / FOLDER / "runs").mkdir(parents=True, exist_ok=True)
    world, clients, errors = environment(), [], []
    found = {page.key: lookup(root, page_cells(page), world) for page in pages}
    times = root / FOLDER / "seconds.json"
    known = json.loads(times.read_text()) if times.is_file() else {}
    if any(end < len(page_cells(page)) for page in pages for end, _ in [found[page.key]]):
        warm_up(root)

    def work(page):
        try:
            return None if errors else run_page(root, page, world, found[page.key], clients, tell)
        except BookError as error:
            errors.append(error)  # and end the other pages: theirs come second
            for client in clients:
                client.km.provisioner.process.kill()

    order = sorted(pages, key=lambda page: -known.get(page.key, 1e9))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = dict(zip([page.key for page in order], pool.map(work, order), strict=True))
    if errors:
        raise errors[0]
    known.update({key: round(sum(run.seconds), 2) for key, run in runs.items()})
    write_whole(times, json.dumps(known, indent=1))
    trim(root)
    return runs


def write_whole(path, text):
    """Write a file so that no reader ever sees half of it."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)


def page_cells(page):
    """Return what of a page is run, in order."""
    return [block for block in page.blocks if isinstance(block, Cell | Inline)]


def kernel_environment(root):
    """Return the variables of a kernel: one thread, and nothing of the user's."""
    folder = root / FOLDER
    own = {"BOOK_ROOT": root, "IPYTHONDIR": folder / "ipython", "MPLCONFIGDIR": folder / "matplotlib"}
    own |= {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "PYTHONPATH": root}
    own |= {"OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1, "PYTHONHASHSEED": 0, "JUPYTER_PLATFORM_DIRS": 1}
    dropped = ("PYTHONWARNINGS", "PYTHONSTARTUP")
    return {k: v for k, v in os.environ.items() if k not in dropped} | {k: str(v) for k, v in own.items()}


def warm_up(root):
    """Let matplotlib list its fonts once, so that no page waits or is told."""
    subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], env=kernel_environment(root), check=True)


def run_page(root, page, world, found, clients, tell):
    """Run the cells of a page that no entry answers for; return its Run."""
    cells, (start, entry) = page_cells(page), found
    run = Run(entry["outputs"], entry["seconds"], entry["files"], start) if entry else Run([], [], {}, 0)
    tell(page, start, len(cells))
    if start == len(cells):
        return run
    settings = {"kernel_name": "python3", "allow_errors": True, "extra_arguments": ["--log-level=ERROR"]}
    client = NotebookClient(new_notebook(cells=[new_code_cell()]), **settings)
    with client.setup_kernel(env=kernel_environment(root), cwd=str(root)):
        clients.append(client)
        ask(client, f"exec({KERNEL.read_text()!r}, (m := __import__('types').ModuleType('book')).__dict__); "
                    "__import__('sys').modules['book'] = m; del m; __import__('book').start()")
        if start:
            ask(client, f"__import__('book').restore({str(entry['snapshot'])!r})")
        for number, cell in enumerate(cells[start:], start):
            before = time.perf_counter()
            run.outputs.append(run_cell(client, page, cells, number, start))
            run.seconds.append(time.perf_counter() - before)
            tell(page, number + 1, len(cells))
            if keeps(cell) or number + 1 == len(cells):
                run = run._replace(files=run.files | ask(client, "__import__('book').report()"))
                state = keep_state(root, client, page, cell) if keeps(cell) else None
                store(root, cells[: number + 1], world, run, state)
    return run


def ask(client, code):
    """Run code of our own in the kernel; return the value that it prints as JSON."""
    client.timeout = None
    cell = client.execute_cell(new_code_cell(code), 0, store_history=False)
    for output in cell.outputs:
        if output.output_type == "error":
            raise RuntimeError("\n".join(output.traceback))
    text = "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")
    return json.loads(text) if text.strip() else None


def keep_state(root, client, page, cell):
    """Write a snapshot of the page's state; return its temporary file."""
    with tempfile.NamedTemporaryFile(dir=root / FOLDER / "runs", suffix=".tmp", delete=False) as file:
        hindrance = ask(client, f"__import__('book').save({file.name!r})")
    if hindrance:
        os.unlink(file.name)
        name, kind = hindrance
        message = f"{name!r} ({kind}) cannot be kept; delete it or drop cache: true"
        raise BookError(page.file, cell.line, message)
    return Path(file.name)


def run_cell(client, page, cells, number, start):
    """Run one cell, in a kernel that began at cell `start`; return its outputs, checked."""
    cell = cells[number]
    options = getattr(cell, "options", {})
    source = cell.source if isinstance(cell, Cell) else f"print(\n{cell.source}\n, end='')"
    client.timeout = limit = options.get("timeout", TIME_LIMIT)
    client.nb.cells = [new_code_cell(source)]
    try:
        done = client.execute_cell(client.nb.cells[0], 0, execution_count=number + 1)
    except CellTimeoutError:
        raise BookError(page.file, cell.line, f"the cell ran longer than {limit} seconds", cell.source) from None
    except DeadKernelError:
        raise BookError(page.file, cell.line, "the kernel died in this cell", cell.source) from None
    error = next((o for o in done.outputs if o.output_type == "error"), None)
    wanted = options.get("raises")
    if error and error.ename != wanted:
        place = locate(client, page, cell, cells[start:])
        raise BookError(*place, f"{error.ename}: {error.evalue}", cell.source)
    if wanted and not error:
        raise BookError(page.file, cell.line, f"the cell did not raise {wanted}", cell.source)
    outputs = [json.loads(json.dumps(o)) for o in done.outputs if o.output_type != "display_data" or o.data]
    for output in outputs:
        output |= {name: empty for name, empty in (("traceback", []), ("execution_count", None)) if name in output}
        text = output.get("text") or output.get("evalue") or output.get("data", {}).get("text/plain", "")
        if output.get("name") == "stderr" and not options.get("stderr"):
            raise BookError(page.file, cell.line, f"the cell wrote to stderr: {text.strip()}", cell.source)
        if ADDRESS.search(text):
            raise BookError(page.file, cell.line, f"an address of memory changes with every run: {text.strip()}")
    return outputs


def locate(client, page, cell, cells):
    """Return the file and line of the last error: the innermost of ours."""
    if isinstance(cell, Inline):
        return page.file, cell.line
    for where, line in reversed(ask(client, "__import__('book').locate()")):
        if isinstance(where, str):
            return where, line
        blamed = cells[where - 1] if 0 < where <= len(cells) else None
        if isinstance(blamed, Cell) and 0 < line <= len(blamed.origin):
            return blamed.origin[line - 1]
    return page.file, cell.line
