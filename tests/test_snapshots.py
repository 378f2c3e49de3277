"""A page that goes on from a snapshot gives, byte for byte, what a page that ran through gives."""

import pytest
from toy import Toy, printed

from hooks.expand import BookError

MODULE = """
    count = 0
    words = ["query"]

    def read():
        return count, words
"""
PYTHON = [
    """
    #| cache: true
    import random
    import sys
    import warnings
    import xml.dom.minidom
    from dataclasses import dataclass
    from enum import Enum
    from typing import NamedTuple

    import numpy as np
    import snippets.state as state
    from snippets.state import words

    random.seed(3)
    own = random.Random(4)
    np.random.seed(1)
    numbers = np.random.default_rng(5)
    numbers.random(), own.random(), random.random()
    np.set_printoptions(precision=2)
    np.seterr(divide="raise")
    warnings.filterwarnings("ignore", "quiet")
    sys.path.insert(0, "first")
    state.count += 1
    words.append("key")

    scale = 1
    def times(x):
        return x * scale
    def counter():
        n = 0
        def step():
            nonlocal n
            n += scale
            return n
        return step
    step = counter()
    same = step
    step()
    double = lambda x: 2 * times(x)
    def wrong(x):
        return 1 / x
    @dataclass
    class Point:
        x: int = 1
        def moved(self):
            return Point(self.x + scale)
    class Colour(Enum):
        RED = 1
    class Pair(NamedTuple):
        a: int
    point, colour, pair, many = Point(2), Colour.RED, Pair(4), [[], []]
    many[1] = many[0]
    base = np.zeros(6)
    view, grid = base[2:], base.reshape(2, 3).T
    In, open, _ = 3, 4, 5
    table = {"b": 1, "a": {"z", "y"}}
    """,
    "print(random.random(), own.random(), np.random.rand(2), numbers.random(2))",
    "scale = 5\nprint(times(1), double(2), step(), same(), point.moved(), Point(2).moved())",
    "print(times.__globals__ is globals(), point == Point(2), isinstance(point, Point))",
    "print(colour is Colour.RED, pair == Pair(4), pair, point, times.__module__)",
    "view[0] = 7\ngrid[0, 1] = 8\nmany[0].append(1)\nprint(base, many)",
    "try:\n    np.ones(1) / 0\nexcept FloatingPointError as error:\n    print(error)",
    "warnings.warn('quiet')\nprint(sys.path[0], xml.dom.minidom.__name__)",
    "words.append('value')\nprint(state.count, state.read(), words is state.words)",
    "print(In, open, _, table['b'], sorted(table['a']))",
    "print(sorted(name for name in globals() if name[0] != '_'))",
    "#| raises: ZeroDivisionError\nwrong(0)",
    "#| stderr: true\nwarnings.warn('loud')",
    "Inline: `{python} times(2)` and `{python} Point()`.",
    "Point()",
]
TORCH = [
    """
    #| cache: true
    import matplotlib.pyplot as plt
    import torch
    from torch import nn

    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    torch.set_printoptions(precision=3)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.two.weight = self.one.weight
            self.drop = nn.Dropout(0.5)
            self.register_buffer("mean", torch.ones(3))

        def forward(self, x):
            return self.two(self.drop(torch.relu(self.one(x)))) * factor - self.mean

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = net(torch.randn(4, 3)).pow(2).sum()
            loss.backward()
            optimizer.step()
        return loss.item()

    factor = 1
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    train(3)
    memory = torch.arange(6.0)
    view, turned = memory[2:4], memory.view(2, 3).T
    leaf = torch.ones(2, requires_grad=True)
    (leaf * 3).sum().backward()
    generator = torch.Generator().manual_seed(5)
    torch.rand(2, generator=generator)
    plt.rcParams["lines.linewidth"] = 7
    figure, axes = plt.subplots()
    axes.plot([1, 3, 2])
    plt.close(figure)
    torch.set_grad_enabled(False);
    """,
    "print(torch.is_grad_enabled(), torch.zeros(1).dtype, torch.tensor(1 / 3), leaf.grad, view)",
    "view[0] = 99\nprint(memory, turned)",
    "print(net.one.weight is net.two.weight, net.one.weight.grad)",
    "print(torch.rand(2), torch.rand(2, generator=generator))",
    "torch.set_grad_enabled(True)\nfactor = 2\nprint(train(3), optimizer.state_dict())",
    "net.eval()",
    "figure",
    "axes.plot([2, 2, 2])\nfigure.number if hasattr(figure, 'number') else plt.get_fignums()",
    "plt.plot([1, 2]);",
]


@pytest.fixture(scope="module", params=["python", "torch"])
def both(request, tmp_path_factory):
    """Return the outputs of a page that ran through, and of one that went on from a snapshot."""
    toy = Toy(tmp_path_factory.mktemp("snapshots"))
    toy.write("snippets/state.py", MODULE)
    cells = {"python": PYTHON, "torch": TORCH}[request.param]
    cold = toy.cells(*cells)
    for path in toy.runs.glob("*.json"):
        if not path.with_suffix(".state").exists():
            path.unlink()  # the entry of the whole page
    restored = toy.cells(*cells)
    assert (cold.kept, restored.kept) == (0, 1)
    return cold, restored


def test_a_restored_page_gives_the_same_bytes(both):
    cold, restored = both
    assert len(cold.outputs) == len(restored.outputs) > 9
    for one, other in zip(cold.outputs[1:], restored.outputs[1:], strict=True):
        assert one == other
        assert one  # each cell says something


def test_a_restored_page_rests_on_the_same_files(both):
    cold, restored = both
    assert cold.files.items() <= restored.files.items()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("batches = (n for n in range(3))", "'batches' (generator)"),
        ("def use():\n    return next(g)\ng = (n for n in range(3))", "'g' (generator)"),
        ("import threading\nlock = [threading.Lock()]", "'lock' (list)"),
        (
            "import torch\na = torch.ones(2, requires_grad=True)\nloss = (a * 2).sum()",
            "'loss' (tensor with a graph)",
        ),
        (
            "import snippets.state\nsnippets.state.words.append(n for n in [])",
            "'snippets.state.words' (list)",
        ),
    ],
    ids=["generator", "global generator", "lock", "graph", "module"],
)
def test_what_cannot_be_kept_stops_the_build_with_its_name(tmp_path, source, message):
    toy = Toy(tmp_path)
    toy.write("snippets/state.py", MODULE)
    with pytest.raises(BookError) as caught:
        toy.cells("1;", f"#| cache: true\n{source}")
    first, *rest = str(caught.value).split("\n")
    assert first == f"docs/page.md:7: {message} cannot be kept; delete it or drop cache: true"
    assert source in "\n".join(rest)
    assert not list(toy.runs.iterdir())


def test_a_restored_page_is_kept_again(tmp_path):
    toy = Toy(tmp_path)
    first = "#| cache: true\nscale = 2\ndef times(x):\n    return x * scale"
    last = "print(times(3), twice(3), max(1, 2))"
    toy.cells(first, "#| cache: true\ntwice = lambda x: times(x)", last)
    second = "#| cache: true\ntwice = lambda x: 2 * times(x)"
    restored = toy.cells(first, second, last)
    assert (restored.kept, printed(restored)) == (1, "6 12 2\n")
    once_more = toy.cells(first, second, f"{last}\nprint(twice(max(4, 5)))")
    assert (once_more.kept, printed(once_more)) == (2, "6 12 2\n20\n")


def test_an_error_after_a_snapshot_is_found_in_the_cell_before_it(tmp_path):
    toy = Toy(tmp_path)
    before = "#| cache: true\ndef wrong(x):\n    return 1 / x"
    toy.cells(before, "print(wrong(1))")
    with pytest.raises(BookError, match=r"^docs/page\.md:6: ZeroDivisionError: division by zero"):
        toy.cells(before, "print(wrong(0))")
