"""Run the cells of pages in kernels, once, and keep what they gave.

An entry of the run cache answers for the first n cells of a page. Its key is the text of these
cells, this executor's source and all package versions; it has the files that the run read, with
their hashes, and is used only while every one is as it was. An entry that ends at a cell with
`#| cache: true` has a snapshot of the page's state beside it, from which a run goes on.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from subprocess import DEVNULL
from typing import NamedTuple

from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat.v4 import new_code_cell, new_notebook

from hooks.expand import BookError, Cell, Inline
from hooks.kernel import digest

FOLDER = Path(".cache", "book")  # below the root
TIME_LIMIT = 120  # seconds a cell, unless it says otherwise
SIZE_LIMIT = 4e9  # bytes of the run cache
UNFIT = {  # what no output may have
    r"\bat 0x[0-9a-fA-F]{6,}": "an address of memory changes with every run (; hides a result)",
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f]": "control characters (colours, progress bars) show badly",
    r"(?s).{20001}": "more than 20,000 characters are too much for a reader",
}
logging.getLogger("asyncio").setLevel("CRITICAL")  # nbclient drops a task when time is up


class Run(NamedTuple):
    """What the cells of a page gave: for each cell, its outputs and seconds."""

    outputs: list
    seconds: list
    files: dict  # read by the run: path → hash
    kept: int  # cells whose results came from the cache


class Build(NamedTuple):
    """What the runs of one build share."""

    root: Path
    folder: Path  # of the entries
    world: str  # what every run depends on besides its own cells
    kernels: list  # processes
    stopped: threading.Event
    tell: object  # called with page, cells done, cells in all


def run_pages(root, pages, tell):
    """Run pages side by side, longest first; return {key: Run}."""
    root, runs = Path(root).resolve(), {}
    folder, times = root / FOLDER / "runs", root / FOLDER / "seconds.json"
    folder.mkdir(parents=True, exist_ok=True)
    build = Build(root, folder, environment(), [], threading.Event(), tell)
    known = read_entry(times) or {}
    order = sorted(pages, key=lambda page: -known.get(page.key, 1e9))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {pool.submit(lambda p: asyncio.run(run_page(build, p)), p): p.key for p in order}
        try:
            for job in as_completed(jobs):
                runs[jobs[job]] = job.result()
        except BaseException:  # an error or Ctrl-C ends the other pages too
            build.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for kernel in build.kernels:
                kernel.kill()
            raise
    write_entry(times, known | {key: round(sum(run.seconds), 2) for key, run in runs.items()})
    trim(folder)
    return runs


def page_cells(page):
    """Return what of a page is run, in order."""
    return [block for block in page.blocks if isinstance(block, Cell | Inline)]


# The run cache


def sha(*parts):
    """Return the hash of plain data."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def environment():
    """Return the hash of the executor and of all that is installed."""
    packages = {path.name for folder in sys.path for path in Path(folder).glob("*.dist-info")}
    own = [Path(__file__).with_name(name).read_text() for name in ("run.py", "kernel.py")]
    return sha(sys.version, sorted(packages), own)


def code_key(cells, world):
    """Return the key of a run of these cells."""
    options = [[c.options.get(name) for name in ("raises", "stderr", "cache")] for c in cells]
    return sha(world, options, [[type(c).__name__, c.source] for c in cells])


def lookup(build, cells):
    """Return the longest run that is still true, and its snapshot."""
    ends = {len(cells)} | {i for i, cell in enumerate(cells, 1) if cell.options.get("cache")}
    for end in sorted(ends, reverse=True):
        for path in build.folder.glob(f"{code_key(cells[:end], build.world)}-*.json"):
            entry, state = read_entry(path), path.with_suffix(".state")
            files = entry["files"].items() if entry else ()
            same = all(digest(os.path.join(build.root, name)) == then for name, then in files)
            if entry and same and (end == len(cells) or digest(state) == entry["state"]):
                with contextlib.suppress(FileNotFoundError):  # there may be no snapshot
                    os.utime(path)  # the oldest go first
                    os.utime(state)
                return Run(entry["outputs"], entry["seconds"], entry["files"], end), state
    return Run([], [], {}, 0), None


def read_entry(path):
    """Return what `write_entry` wrote, or None if it is damaged."""
    try:
        check, _, text = path.read_text(encoding="utf-8").partition("\n")
        return json.loads(text) if sha(text) == check else None
    except (OSError, ValueError):
        return None


def write_entry(path, data):
    """Write data with a checksum."""
    text = json.dumps(data)
    write_whole(path, f"{sha(text)}\n{text}")


def write_whole(path, text):
    """Write a file so that no reader ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)


def trim(folder):
    """Keep the youngest entries, as many as the cache has room for."""
    size, found = 0, []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another build has removed it
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    for _, more, path in sorted(found, reverse=True):
        size += more
        if size > SIZE_LIMIT:
            path.unlink(missing_ok=True)


async def keep(build, client, page, cells, run):
    """Write an entry for the run of these first cells; return the run with the files it read."""
    run = run._replace(files=await ask(client, "report()") | run.files)  # as they were at first
    name = f"{code_key(cells, build.world)}-{sha(sorted(run.files.items()))[:16]}.json"
    path, entry = build.folder / name, run._asdict() | {"state": None}
    if cells[-1].options.get("cache"):
        with tempfile.NamedTemporaryFile(dir=build.folder, delete=False) as file:
            hindrance = await ask(client, f"save({file.name!r})")
        if hindrance:
            os.unlink(file.name)
            problem = "{!r} ({}) cannot be kept; delete it or drop cache: true"
            raise fault(page, cells[-1], problem.format(*hindrance))
        entry["state"] = digest(file.name)
        os.replace(file.name, path.with_suffix(".state"))
    write_entry(path, entry)
    return run


# Kernels


async def run_page(build, page, cold=False):
    """Run the cells of a page that no entry answers for; return its Run."""
    cells = page_cells(page)
    run, state = lookup(build, [] if cold else cells)
    build.tell(page, run.kept, len(cells))
    if run.kept == len(cells):
        return run
    client = NotebookClient(new_notebook(cells=[new_code_cell()]), kernel_name="python3")
    client.allow_errors, client.shutdown_kernel = True, "immediate"
    client.raise_on_iopub_timeout = True  # rather than lose an output
    where = {"env": variables(build), "cwd": str(build.root), "stdout": DEVNULL, "stderr": DEVNULL}
    async with client.async_setup_kernel(**where):
        build.kernels.append(client.km.provisioner.process)
        try:
            await ask(client, f"start({str(build.root)!r}, {run.kept})")
            if run.kept and not await ask(client, f"restore({str(state)!r})"):
                return await run_page(build, page, cold=True)
            return await run_cells(build, client, page, cells, run)
        except RuntimeError as error:  # dead, or what is asked of it fails
            cell = cells[min(len(run.outputs), len(cells) - 1)]
            raise fault(page, cell, f"the kernel failed in this cell: {error}") from None


def variables(build):
    """Return the environment of a kernel: one thread, and no settings of the user's."""
    others = ("PYTHON", "PYTEST", "IPYTHON", "MPL", "OMP_", "MKL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    own = {"PYTHONPATH": build.root, "PYTHONHASHSEED": 0, "PYTHONDONTWRITEBYTECODE": 1}
    own |= {"OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1, "IPYTHONDIR": build.folder / "../ipython"}
    own["MPLCONFIGDIR"] = build.folder / "../matplotlib"
    return kept | {name: str(value) for name, value in own.items()}


async def run_cells(build, client, page, cells, run):
    """Run the cells that `run` has no outputs of; return it complete, and keep it."""
    for number, cell in enumerate(cells[run.kept :], run.kept + 1):
        if build.stopped.is_set():
            raise DeadKernelError("stopped")
        before = time.perf_counter()
        run.outputs.append(await run_cell(client, page, cells, cell))
        run.seconds.append(time.perf_counter() - before)
        build.tell(page, number, len(cells))
        if cell.options.get("cache") or number == len(cells):
            run = await keep(build, client, page, cells[:number], run)
    return run


async def run_cell(client, page, cells, cell):
    """Run one cell; return its outputs, checked."""
    source, wanted = cell.source, cell.options.get("raises")
    if isinstance(cell, Inline):
        source = f"__import__('builtins').print((\n{source}\n), end='')"
    client.timeout = cell.options.get("timeout", TIME_LIMIT)
    try:
        outputs = tidy((await client.async_execute_cell(new_code_cell(source), 0)).outputs)
    except CellTimeoutError:
        limit = f"the cell ran longer than its limit of {client.timeout} seconds"
        raise fault(page, cell, limit) from None
    error = next((output for output in outputs if output["output_type"] == "error"), None)
    if error and error["ename"] != wanted:
        message = f"{error['ename']}: {error['evalue']}".removesuffix(": ")
        raise BookError(*await locate(client, page, cell, cells), message, cell.source)
    if wanted and not error:
        raise fault(page, cell, f"the cell did not raise {wanted}")
    for output in outputs:
        texts = [text for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
        text = "\n".join([output.get("text", ""), output.get("evalue", ""), *texts])
        if output.get("name") == "stderr" and not cell.options.get("stderr"):
            raise fault(page, cell, f"the cell wrote to stderr: {text.strip()}")
        for pattern, problem in UNFIT.items():
            if re.search(pattern, text):
                raise fault(page, cell, f"{problem}: {text[:200]!r}")
    return outputs


def fault(page, cell, message):
    """Return an error at the first line of a cell."""
    return BookError(page.file, cell.line, message, cell.source)


def tidy(outputs):
    """Return outputs as plain data; what depends on timing or the machine is left out."""
    tidied, streams = [], {}
    for output in json.loads(json.dumps(outputs)):
        output |= {k: v for k, v in (("traceback", []), ("execution_count", None)) if k in output}
        name = output.get("name")
        if name in streams:
            streams[name]["text"] += output["text"]
        elif output.get("data") != {}:
            tidied.append(output)
            streams = {**streams, name: output} if name else {}
    return tidied


async def locate(client, page, cell, cells):
    """Return the file and line of the last error: the innermost that is ours."""
    for name, line in reversed(await ask(client, "locate()")):
        if not name.startswith("<cell "):
            return name, line
        origin = cells[int(name[6:-1]) - 1].origin
        if line <= len(origin):
            return origin[line - 1]
    return page.file, cell.line


async def ask(client, call):
    """Call a function of hooks/kernel.py in the kernel; return its answer."""
    client.timeout = None
    code = f"__import__('hooks.kernel').kernel.{call}"
    done = await client.async_execute_cell(new_code_cell(code), 0, store_history=False)
    for output in done.outputs:
        if output.output_type == "error":
            raise RuntimeError(f"{output.ename}: {output.evalue}")
    answers = [o.data["application/json"] for o in done.outputs if o.output_type == "display_data"]
    return answers[0] if answers else None
