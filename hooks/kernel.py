"""What the executor runs inside a page's kernel, around the page's own code.

It notes each file that the run reads, keeps the state of a page and brings it back, and tells where
an error happened. Kept are the page's names, functions and classes of its own included; values in
the project's modules; what was imported; random states; settings of numbers, warnings, drawings;
working directory and search path. Not kept: other settings of libraries, environment variables,
what was changed in modules' classes, memory that NumPy shares with torch, the order of sets.
"""

import contextlib
import hashlib
import importlib
import io
import logging
import os
import pickle
import sys
import sysconfig
import tempfile
import threading
import traceback
import types
import warnings
import zipfile
from functools import partial
from importlib.machinery import SourceFileLoader
from operator import attrgetter
from pathlib import Path

import cloudpickle

INSTALLED = [str(Path(os.__file__).parents[1]), *map(sysconfig.get_path, ("purelib", "platlib"))]
SYSTEM = ("/usr/lib", "/usr/share/fonts", "/etc", "/dev", "/proc", "/sys", tempfile.gettempdir())
CODE = types.FunctionType | types.BuiltinFunctionType | types.ModuleType | type
SETTINGS = (  # the module, how to read a setting, how to write it
    ("os", "getcwd", "chdir"),
    ("sys", "path.copy", "path.__init__"),
    ("warnings", "filters.copy", "filters.extend"),
    ("random", "getstate", "setstate"),
    ("numpy.random", "get_state", "set_state"),
    ("numpy", "get_printoptions", "set_printoptions"),
    ("numpy", "geterr", "seterr"),
    ("torch", "get_rng_state", "set_rng_state"),
    ("torch", "is_grad_enabled", "set_grad_enabled"),
    ("torch", "get_default_dtype", "set_default_dtype"),
    ("torch._tensor_str", "get_printoptions", "set_printoptions"),
    ("matplotlib", "rcParams.copy", "rcParams.update"),
)
PAGE = object()  # stands for the page's namespace in a snapshot
now = types.SimpleNamespace(root=Path(), packages=[], shell=None, failure=None)
files, arrived = {}, threading.Semaphore(0)
get_code, stat = SourceFileLoader.get_code, os.stat


def start(root, count):
    """Set up the kernel for a page of the project at `root` whose first `count` cells are kept."""
    now.root, now.packages = Path(root), os.listdir(root)
    now.shell = sys.modules["IPython"].get_ipython()
    now.shell.execution_count = count + 1
    for name in ("exit", "quit"):  # they would end the kernel, but some time later
        del now.shell.user_ns[name]
    now.shell.InteractiveTB.set_mode("Minimal")  # what nobody sees takes no time
    now.shell.compile.get_code_name = lambda raw, code, number: f"<cell {number}>"
    now.shell.events.register("post_run_cell", after_cell)
    drawing = now.shell.config.InlineBackend
    drawing.figure_formats, drawing.rc = {"svg"}, {"svg.fonttype": "none", "svg.hashsalt": "book"}
    drawing.print_figure_kwargs = {"bbox_inches": None, "metadata": {"Date": None}}
    logging.getLogger("matplotlib.font_manager").setLevel("ERROR")  # the first run lists fonts
    now.shell._tee = lambda channel: contextlib.nullcontext()  # IPython would write all output down
    stream = type(sys.stdout)
    write = partial(partial, heard, stream.write)
    stream.write = property(write, lambda *_: None)  # IPython puts back what it has replaced
    SourceFileLoader.get_code, os.stat = fresh_code, noted_stat
    sys.addaudithook(note)


def answer(value):
    """Give a value to the executor."""
    now.shell.display_pub.publish({"application/json": value})


def heard(write, stream, text):
    """Write text; a zero byte says that all before it has arrived."""
    if "\0" in text:
        arrived.release()
    return write(stream, text.replace("\0", ""))


def after_cell(result):
    """Keep the error of a cell; wait for what subprocesses wrote, which comes through pipes."""
    now.failure = result.error_before_exec or result.error_in_exec
    for number in (1, 2):
        os.write(number, b"\0")
    for _ in (1, 2):
        arrived.acquire(timeout=5)


def locate():
    """Answer with the frames of the last error that are the page's or the project's."""
    steps = traceback.walk_tb(now.failure.__traceback__)
    frames = [(frame.f_code.co_filename, line) for frame, line in steps]
    if isinstance(now.failure, SyntaxError):
        frames.append((now.failure.filename or "", now.failure.lineno))
    known = [place for place in frames if place[0].startswith("<cell ") or ours(Path(place[0]))]
    answer([[name.removeprefix(f"{now.root}/"), line] for name, line in known])


def report():
    """Answer with the files that the run has read, and what was in them."""
    answer({name.removeprefix(f"{now.root}/"): then for name, then in files.items() if then})


def digest(path):
    """Return the hash of what is at `path` now; a path that ends in / is a folder's names."""
    try:
        if str(path).endswith("/"):
            content = "\0".join(sorted(filter(visible, os.listdir(path)))).encode()
        else:
            content = Path(path).read_bytes()
        return hashlib.sha256(content).hexdigest()
    except (OSError, ValueError) as error:
        return type(error).__name__


def visible(name):
    """Tell whether authors, not tools, give this name to a file."""
    return not name.startswith((".", "<")) and name != "__pycache__"


def ours(path):
    """Tell whether a path is the project's own."""
    inside = path.is_relative_to(now.root) and all(map(visible, path.relative_to(now.root).parts))
    return inside and not any(map(path.is_relative_to, [*INSTALLED, __file__]))


def remember(name, end="", new=False):
    """Note what is at a path before it is read, unless the run itself has made it."""
    name = os.path.abspath(os.fsdecode(name)) + end
    path = Path(name)
    foreign = any(map(path.is_relative_to, [now.root, *INSTALLED, *SYSTEM]))
    if name not in files and (ours(path) or not foreign) and name != str(now.root):
        files[name] = None  # since `digest` reads it as well
        files[name] = None if new else digest(name)


def note(event, arguments):
    """Note each file, folder and module that code looks for: an audit hook."""
    if event == "import" and (parts := arguments[0].split("."))[0] in now.packages:
        remember(now.root.joinpath(*parts).with_suffix(".py"))
    elif event == "open" and not isinstance(arguments[0], int):
        remember(arguments[0], new=(arguments[2] or 0) & (os.O_TRUNC | os.O_EXCL))
    elif event in ("os.listdir", "os.scandir") and not isinstance(arguments[0], int):
        importing = "importlib" in sys._getframe(1).f_code.co_filename
        remember(arguments[0] or ".", "/") if not importing else None


def noted_stat(path, *arguments, **options):
    """Look at a file, of which no audit event tells, and which may be there next time."""
    note("open", (path, None, 0))
    return stat(path, *arguments, **options)


def fresh_code(loader, name):
    """Compile the project's modules anew: kept byte code cannot tell two edits of one second."""
    path = loader.get_filename(name)
    own = ours(Path(path))
    return loader.source_to_code(loader.get_data(path), path) if own else get_code(loader, name)


class Pickler(cloudpickle.Pickler):
    """Pickle functions with the page's own namespace, and tensors with their gradients."""

    gradients = []

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.globals_ref[id(now.shell.user_ns)] = PAGE

    def reducer_override(self, value):
        """Keep what cloudpickle and torch would lose, or refuse it."""
        if value is PAGE:
            return vars, (sys.modules["__main__"],)
        if isinstance(value, types.CodeType):  # cloudpickle forgets the cell
            make, parts = self.dispatch_table[types.CodeType](value)
            name = value.co_filename
            return make, tuple(name if part == "<dynamic-code>" else part for part in parts)
        if (torch := sys.modules.get("torch")) and isinstance(value, torch.Tensor):
            if value.grad_fn is not None or value._backward_hooks:
                raise pickle.PicklingError("tensor with a graph")
            if value.grad is not None:
                self.gradients.append((value, value.grad))
        view = type(value).__name__ == "ndarray" and type(value.base) is type(value)
        if view and value.base.flags.c_contiguous and not value.dtype.hasobject:
            offset = value.ctypes.data - value.base.ctypes.data
            return type(value), (value.shape, value.dtype, value.base, offset, value.strides)
        return super().reducer_override(value)


def dump(value, file):
    """Pickle a value; torch's own writer keeps memory shared that tensors share."""
    Pickler.gradients = []
    payload = [value, Pickler.gradients]  # the second is filled while the first is written
    if torch := sys.modules.get("torch"):
        torch.save(payload, file, pickle_module=sys.modules[__name__], pickle_protocol=5)
    else:
        Pickler(file, protocol=5).dump(payload)


def names():
    """Return the values of the page, which is `__main__`, and of the project's modules."""
    hidden, found = now.shell.user_ns_hidden, {}
    for name, module in list(sys.modules.items()):
        values = getattr(module, "__dict__", {})
        if name == "__main__":
            found[name] = {k: v for k, v in values.items() if v is not hidden.get(k, hidden)}
            found[name].pop("__builtins__", None)  # cloudpickle sets it when it restores functions
        elif ours(Path(values.get("__file__") or "/")):
            kept = {k: v for k, v in values.items() if not k.startswith("__")}
            found[name] = {k: v for k, v in kept.items() if not isinstance(v, CODE)}
    return found


def save(path):
    """Keep the state of the page in a file; answer with what hinders it, [name, type]."""
    loaded = [setting for setting in SETTINGS if setting[0] in sys.modules]
    settings = [(m, write, attrgetter(read)(sys.modules[m])()) for m, read, write in loaded]
    state = {"names": names(), "modules": list(sys.modules), "settings": settings}
    try:
        with open(path, "wb") as file:
            dump(state, file)
        answer(None)
    except Exception as error:
        answer(hindrance(state["names"]) or ["the state", str(error)])


def hindrance(found):
    """Return the name and type of the first value that cannot be kept; functions come last."""
    named = [(f"{m}.{k}", v) for m, values in found.items() for k, v in values.items()]
    for name, value in sorted(named, key=lambda pair: callable(pair[1])):
        try:
            dump(value, io.BytesIO())
        except Exception as error:
            kind = str(error) if "with a graph" in str(error) else type(value).__name__
            return [name.removeprefix("__main__."), kind]


def restore(path):
    """Bring back the state of the page that `save` has kept; answer whether it could be done."""
    try:
        if zipfile.is_zipfile(path):
            state, gradients = importlib.import_module("torch").load(path, weights_only=False)
        else:
            state, gradients = pickle.loads(Path(path).read_bytes())
    except Exception:  # say, another build has removed it
        return answer(False)
    for tensor, gradient in gradients:
        tensor.grad = gradient
    for name in state["modules"]:
        with contextlib.suppress(Exception):  # some names only stand for a module
            importlib.import_module(name)
    for name, values in state["names"].items():
        vars(sys.modules[name]).update(values)
    warnings.resetwarnings()
    for module, write, value in state["settings"]:
        call = attrgetter(write)(sys.modules[module])
        call(**value) if isinstance(value, dict) else call(value)
    answer(True)
