"""Draw every figure and table of the book in one style.

This is the one place that knows colours and sizes. The colours are
stand-ins: a notebook shows them as they are, the site replaces each by a
variable of its style sheet, so that one drawing serves the light and the
dark scheme. Figures are drawn at the size of a phone first (3.4 inches a
panel); they have no title, since the caption is the title.
"""

import html
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgba
from matplotlib.ticker import MaxNLocator

INK = "#2b2a33"  # text, axes and whatever is drawn like text
RULE = "#a9a59b"  # grid lines, frames and helping lines
PAPER = "#fdfcf9"  # the ground, where something must be cut out of it
ACCENT = "#1f56a8"  # weights: its opacity is the weight
SERIES = ("#2464c6", "#a0340c", "#005247", "#40155a", "#78736b")

DASHES = (
    "-",
    (0, (5, 1.6)),
    (0, (1.2, 1.4)),
    (0, (6, 1.5, 1.2, 1.5)),
    (0, (3, 1.2)),
)
MARKERS = "os^Dv"

plt.rc("svg", fonttype="none")  # text stays text, in the font of the page
plt.rc("svg", hashsalt="attention")  # the same bytes on every run
plt.rc("path", simplify_threshold=0.25)  # a line needs no more corners
plt.rc("figure.constrained_layout", use=True)
plt.rc(("figure", "axes", "savefig"), facecolor="none")
plt.rc("font", size=9)
plt.rc("text", color=INK)
plt.rc("axes", labelsize=9, labelcolor=INK, edgecolor=INK, linewidth=0.6)
plt.rc("axes", prop_cycle=plt.cycler(color=SERIES))
plt.rc("axes.spines", top=False, right=False)
plt.rc(("xtick", "ytick"), labelsize=9, color=INK)
plt.rc(("xtick.major", "ytick.major"), width=0.6, size=3)
plt.rc("grid", color=RULE, linewidth=0.5)
plt.rc("lines", linewidth=1.6, markersize=4)
plt.rc("patch", edgecolor=INK)


def new_figure(rows=1, columns=1, width=3.4, height=2.4, **options):
    """Make an empty figure whose panels share the style of the book.

    `width` and `height` are those of the whole figure, in inches; the other
    options are those of `plt.subplots`, and so is what comes back: figure,
    axes. pyplot forgets the figure at once, so that a notebook which returns
    it shows it once, not twice.
    """
    figure, axes = plt.subplots(
        rows, columns, figsize=(width, height), **options
    )
    plt.close(figure)
    return figure, axes


def heatmap(axes, weights, *, xlabels=None, ylabels=None, vmax=1.0):
    """Draw attention weights as squares, as opaque as the weight is large.

    `weights` (T, S): a row for each query, the first at the top, a column
    for each key. 0 is the ground of the page, `vmax` the full colour.
    Returns the mesh of squares; its array holds the weights.
    """
    if hasattr(weights, "detach"):
        weights = weights.detach()
    weights = np.asarray(weights, dtype=float)
    mesh = axes.pcolormesh(
        weights,
        cmap=_opacity(),
        vmin=0,
        vmax=vmax,
        edgecolors=PAPER,
        linewidth=0.6 if max(weights.shape) <= 24 else 0.15,
    )
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set(visible=True, color=RULE)
    for axis, count, labels in zip(
        (axes.yaxis, axes.xaxis),
        weights.shape,
        (ylabels, xlabels),
        strict=True,
    ):
        _name_cells(axis, count, labels)
    return mesh


def _opacity():
    """Give the colour map from nothing to the full accent colour."""
    return LinearSegmentedColormap.from_list(
        "weight", [to_rgba(ACCENT, 0.0), to_rgba(ACCENT, 1.0)], N=101
    )


def _name_cells(axis, count, labels):
    """Put a label at the middle of every cell, or a few numbers."""
    if labels is None:
        steps = MaxNLocator(7, integer=True).tick_values(0, count - 1)
        places = [int(step) for step in steps if 0 <= step < count]
        labels = places
    else:
        places = range(count)
    axis.set_ticks([place + 0.5 for place in places], labels)
    if axis.axis_name == "x" and max(len(str(x)) for x in labels) > 2:
        axis.set_tick_params(rotation=90)


def colour_bar(figure, axes, *, vmax=1.0, label="weight"):
    """Add the one scale for all heat maps in `axes` (one, or a list)."""
    mappable = ScalarMappable(Normalize(0, vmax), _opacity())
    bar = figure.colorbar(
        mappable,
        ax=axes,
        label=label,
        shrink=0.8,
        aspect=7 * figure.get_figheight(),  # as thick in every figure
        boundaries=np.linspace(0, vmax, 11),
        ticks=[0, vmax / 2, vmax],
    )
    bar.solids.set(edgecolor=PAPER, linewidth=0.6)
    bar.outline.set(edgecolor=RULE, linewidth=0.6)
    bar.ax.tick_params(length=0)
    return bar


def line(axes, x, y, index, label=None, **options):
    """Draw series `index` with its own colour and dash.

    `label` is written at the end of the line. Returns the line.
    """
    style = {"color": SERIES[index], "linestyle": DASHES[index]} | options
    (drawn,) = axes.plot(x, y, **style)
    if label is not None:
        label_line(axes, x, y, label, index)
    return drawn


def dots(axes, x, y, index, **options):
    """Draw series `index` as points with its own colour and marker."""
    style = {"color": SERIES[index], "marker": MARKERS[index]} | options
    (drawn,) = axes.plot(x, y, linestyle="none", **style)
    return drawn


def label_line(axes, x, y, text, index):
    """Write `text` where the line (x, y) ends, instead of a legend.

    `x` and `y` may be the line's points or the one place to write at.
    """
    end = tuple(float(np.ravel(values)[-1]) for values in (x, y))
    return axes.annotate(
        text,
        end,
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        color=SERIES[index],
        annotation_clip=False,
    )


@dataclass(frozen=True)
class Table:
    """Keep a table of text and show it as Markdown or HTML."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str

    def _repr_markdown_(self):
        """Write the table in Markdown."""
        marks = {"l": ":---", "c": ":---:", "r": "---:"}
        lines = (self.header, [marks[side] for side in self.align], *self.rows)
        return "\n".join(
            f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
            for cells in lines
        )

    def _repr_html_(self):
        """Write the table in HTML."""
        sides = {"l": "left", "c": "center", "r": "right"}
        lines = []
        tags = ["th"] + ["td"] * len(self.rows)
        for tag, cells in zip(tags, [self.header, *self.rows], strict=True):
            line = "<tr>"
            for cell, side in zip(cells, self.align, strict=True):
                name = tag if cell else "td"  # an empty heading is none
                style = f'style="text-align: {sides[side]}"'
                line += f"<{name} {style}>{html.escape(cell)}</{name}>"
            lines.append(line + "</tr>")
        head, body = lines[0], "".join(lines[1:])
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def table(header, rows, align=None):
    """Make a table; numbers stand at the right unless `align` says else.

    `align` has a letter a column: l, c or r. Raises `ValueError` for a row
    that has another number of cells than the header.
    """
    header = tuple(str(cell) for cell in header)
    rows = tuple(tuple(str(cell) for cell in row) for row in rows)
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"{len(header)} columns, but a row is {row}")
    if align is None:
        columns = zip(*rows, strict=True) if rows else [()] * len(header)
        align = "".join(
            "r" if all(_is_number(cell) for cell in column) else "l"
            for column in columns
        )
    return Table(header, rows, align)


def _is_number(text):
    """Tell whether `text` reads as a number, a unit or a sign aside."""
    try:
        float(text.strip().rstrip("%×").replace("−", "-").replace(",", ""))
    except ValueError:
        return False
    return True
