"""What the executor runs inside a page's kernel, before the page's own code.

It notes every file that the run reads, keeps and restores the state of a
page, and tells where an error happened. It prints one line of JSON a call.
"""

import hashlib
import importlib.machinery as machinery
import json
import os
import pickle
import random
import sys
import tempfile
import traceback
import types
from pathlib import Path

import cloudpickle

ROOT = Path(os.environ.get("BOOK_ROOT", "."))
FOREIGN = [sys.prefix, sys.base_prefix, tempfile.gettempdir(), "/proc", "/sys", "/dev", "/etc", "/usr/lib", "/usr/share/fonts"]
PRIVATE = (".cache", ".venv", ".git", "node_modules")
files, written, busy = {}, set(), False


def digest(path):
    """Return the hash of what is at `path` now."""
    path = Path(path)
    if path.is_dir():
        return hashlib.sha256("\0".join(sorted(os.listdir(path))).encode()).hexdigest()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "absent"


def concerns(path):
    """Tell whether the result of the run can depend on `path`."""
    if path.is_relative_to(ROOT):
        return path.relative_to(ROOT).parts[:1] not in [(name,) for name in PRIVATE] and path != ROOT
    return not any(path.is_relative_to(folder) for folder in FOREIGN)


def note(event, arguments):
    """Audit hook: note each file that is read, with its hash at that time."""
    global busy
    if busy or event not in ("open", "os.listdir", "os.scandir"):
        return
    name = arguments[0] if arguments[0] is not None else "."
    if isinstance(name, int) or (event != "open" and "importlib" in sys._getframe(1).f_code.co_filename):
        return
    busy = True
    try:
        path = Path(os.path.abspath(os.fsdecode(name)))
        writes = event == "open" and (
            set(arguments[1] or "") & set("wax+") or (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        )
        if writes:
            written.add(path)
        elif path not in files and path not in written and concerns(path):
            files[path] = digest(path)
    finally:
        busy = False


class FreshLoader(machinery.SourceFileLoader):
    """Compile the project's modules anew: byte code knows seconds only."""

    def get_code(self, name):
        """Return the code object of the source as it is now."""
        path = self.get_filename(name)
        return self.source_to_code(self.get_data(path), path)


def project_finder(path):
    """Path hook: find the project's own modules with FreshLoader."""
    if not Path(path).resolve().is_relative_to(ROOT) or not concerns(Path(path).resolve() / "x"):
        raise ImportError(path)
    return machinery.FileFinder(path, (FreshLoader, [".py"]))


def start():
    """Set up the kernel."""
    import matplotlib
    from matplotlib_inline.config import InlineBackend

    backend = InlineBackend.instance(parent=get_ipython())
    backend.figure_formats = {"svg"}
    backend.print_figure_kwargs = {"bbox_inches": None, "metadata": {"Date": None}}
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "book"})
    sys.path_hooks.insert(0, project_finder)
    sys.path_importer_cache.clear()
    sys.addaudithook(note)


def report():
    """Print the files that the run has read."""
    names = {path: path.relative_to(ROOT) if path.is_relative_to(ROOT) else path for path in files}
    print(json.dumps({str(names[path]): files[path] for path in sorted(files)}))


def locate():
    """Print the frames of the last error: [[cell number or file, line], …]."""
    error, shell = sys.last_value, get_ipython()
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(sys.last_traceback)]
    if isinstance(error, SyntaxError) and error.lineno:
        frames.append((error.filename, error.lineno))
    places = []
    for name, line in frames:
        cell = shell.compile.format_code_name(name)
        path = Path(name)
        if cell:
            places.append([int(cell[1][3:-1]), line])
        elif path.is_absolute() and path.is_relative_to(ROOT) and concerns(path):
            places.append([str(path.relative_to(ROOT)), line])
    print(json.dumps(places))


class Keeper(cloudpickle.Pickler):
    """Pickle tensors with their gradients, and refuse those with a graph."""

    gradients = []

    def reducer_override(self, value):
        """Note a tensor's gradient, which its own pickling leaves out."""
        torch = sys.modules.get("torch")
        if torch and isinstance(value, torch.Tensor):
            if value.grad_fn is not None:
                raise pickle.PicklingError("a tensor with a graph")
            if value.grad is not None:
                self.gradients.append((value, value.grad))
        return super().reducer_override(value)


def dump(value, file):
    """Pickle `value`; torch's own writer keeps what shares memory together."""
    Keeper.gradients = gradients = []
    payload = [value, gradients]  # filled while `value`, the first, is written
    if torch := sys.modules.get("torch"):
        module = types.SimpleNamespace(Pickler=Keeper, __name__="cloudpickle")
        torch.save(payload, file, pickle_module=module, pickle_protocol=5)
    else:
        Keeper(file, protocol=5).dump(payload)


def names():
    """Return the page's own names and values."""
    shell = get_ipython()
    hidden = {"In", "Out", "get_ipython", "exit", "quit", *shell.user_ns_hidden}
    own = {k: v for k, v in shell.user_ns.items() if k not in hidden}
    return {k: v for k, v in own.items() if not (k.startswith("_") and k.strip("_i0123456789") in ("", "dh", "oh", "ih"))}


def save(path):
    """Keep the state of the page in the file `path`; print what hinders it."""
    state = {"names": names(), "random": random.getstate()}
    state["matplotlib"] = dict(sys.modules["matplotlib"].rcParams)
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.random.get_state(), numpy.get_printoptions()
    if torch := sys.modules.get("torch"):
        state["torch"] = torch.get_rng_state(), torch.is_grad_enabled(), torch.get_default_dtype()
        state["torch print"] = vars(torch._tensor_str.PRINT_OPTS)
    try:
        with open(path, "wb") as file:
            dump(state, file)
        print(json.dumps(None))
    except Exception:
        for name, value in state["names"].items():
            try:
                with open(os.devnull, "wb") as file:
                    dump(value, file)
            except Exception as error:
                kind = "tensor with a graph" if "with a graph" in str(error) else type(value).__name__
                print(json.dumps([name, kind]))
                return
        raise


def restore(path):
    """Bring the state of the page back from the file `path`."""
    state, gradients = None, []
    with open(path, "rb") as file:
        zipped = file.read(2) == b"PK"
        file.seek(0)
        if zipped:
            import torch

            state, gradients = torch.load(file, weights_only=False)
        else:
            state, gradients = pickle.load(file)
    for tensor, gradient in gradients:
        tensor.grad = gradient
    get_ipython().user_ns.update(state["names"])
    random.setstate(state["random"])
    sys.modules["matplotlib"].rcParams.update({k: v for k, v in state["matplotlib"].items() if k != "backend"})
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"][0])
        numpy.set_printoptions(**state["numpy"][1])
    if "torch" in state:
        torch.set_rng_state(state["torch"][0])
        torch.set_grad_enabled(state["torch"][1])
        torch.set_default_dtype(state["torch"][2])
        vars(torch._tensor_str.PRINT_OPTS).update(state["torch print"])
