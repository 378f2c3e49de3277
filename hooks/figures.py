"""Make a drawing by matplotlib part of a page: one small SVG for light and dark."""

import itertools
import re
from xml.etree import ElementTree

# The colours that snippets/plotting.py draws with stand for variables of docs/assets/book.css.
VARIABLES = {
    "#2b2a33": "--book-ink",
    "#000000": "--book-ink",  # matplotlib's own default for what nobody coloured
    "#a9a59b": "--book-rule",
    "#fdfcf9": "--book-paper",
    "#ffffff": "--book-paper",
    "#1f56a8": "--book-accent",
    "#2464c6": "--book-series-1",
    "#a0340c": "--book-series-2",
    "#005247": "--book-series-3",
    "#40155a": "--book-series-4",
    "#78736b": "--book-series-5",
}
LARGEST_RASTER = 2_000  # characters of base64: a marker may be one, a picture may not
NAMESPACE = re.compile(r"\{[^}]*\}")
SQUARE = re.compile(r"M (\S+) (\S+) L (\S+) \2 L \3 (\S+) L \1 \4 L \1 \2(?: z)?")
POLYLINE = re.compile(r"M \S+ \S+(?: L \S+ \S+)+")
REFERENCE = re.compile(r"url\(#([^)]+)\)")


def inline_svg(svg: str, *, prefix: str, alt: str) -> str:
    """Turn the SVG file `svg` into one line of HTML that follows the page's scheme and font.

    `prefix` makes its ids unique in the page, `alt` is its text for those who do not see it.
    Raises `ValueError` for a raster picture and for a colour that is not one of the book's.
    """
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        element.tag = NAMESPACE.sub("", element.tag)
        element.attrib = {NAMESPACE.sub("", key): value for key, value in element.attrib.items()}
        element.text = (element.text or "").strip() or None
        element.tail = None
    _drop(root, {"metadata", "style", "title"})
    _merge_cells(root)
    _prefix_ids(root, prefix)
    for element in root.iter():
        _tidy(element)
    width = _natural_width(root)
    root.attrib = {
        "viewBox": root.get("viewBox"),
        "style": f"--width:{width:.0f}",
        "role": "img",
        "aria-label": alt,
        "stroke-linejoin": "round",  # what matplotlib's style element said of everything
    }
    drawing = ElementTree.tostring(root, encoding="unicode")
    return f'<div class="book-scroll" data-search-exclude>{drawing}</div>'


def _drop(parent: ElementTree.Element, tags: set[str]) -> None:
    """Remove what a page has no use for, and the groups that are empty then."""
    for child in list(parent):
        _drop(child, tags)
        empty = child.tag in {"g", "defs"} and len(child) == 0
        empty = empty or (child.tag == "path" and child.get("style") == "fill: none")
        if child.tag in tags or empty:
            parent.remove(child)


def _merge_cells(root: ElementTree.Element) -> None:
    """Join the squares of a heat map that look the same into one short path each."""
    for group in root.iter("g"):
        if not group.get("id", "").startswith("QuadMesh"):
            continue
        alike: dict[tuple, ElementTree.Element] = {}
        for path in group.findall("path"):
            square = SQUARE.fullmatch(" ".join(path.get("d", "").split()))
            if square:
                x, y, to_x, to_y = map(float, square.groups())
                wide, high = to_x - x, to_y - y
                path.set("d", f"M{x:.1f} {y:.1f}h{wide:.6f}v{high:.6f}h{-wide:.6f}z")
            if "fill-opacity: 0;" in path.get("style", ""):
                group.remove(path)
                continue
            look = (path.get("style"), path.get("clip-path"), path.get("transform"))
            first = alike.setdefault(look, path)
            if first is not path:
                first.set("d", first.get("d") + path.get("d"))
                group.remove(path)


def _prefix_ids(root: ElementTree.Element, prefix: str) -> None:
    """Rename the ids that something refers to; drop the others."""
    used = set()
    for element in root.iter():
        used |= {name for value in element.attrib.values() for name in REFERENCE.findall(value)}
        used.add(element.get("href", "").removeprefix("#"))
    for element in root.iter():
        name = element.attrib.pop("id", None)
        if name in used:
            element.set("id", f"{prefix}-{name}")
        for key, value in element.attrib.items():
            element.set(key, REFERENCE.sub(rf"url(#{prefix}-\1)", value))
        if element.get("href", "").startswith("#"):
            # Not plain href: Material's instant navigation sets that, and fails on a drawing.
            element.set("xlink:href", f"#{prefix}-{element.attrib.pop('href')[1:]}")


def _tidy(element: ElementTree.Element) -> None:
    """Take the page's colours and font, and no more digits than can be seen."""
    if element.tag == "image" and len(element.get("href", "")) > LARGEST_RASTER:
        raise ValueError("the figure holds a raster picture; draw it as vectors (plotting.heatmap)")
    rules = [rule.strip() for rule in element.attrib.pop("style", "").split(";") if rule.strip()]
    kept = [rule for rule in rules if not rule.startswith(("font-family", "font:"))]
    if kept:
        element.set("style", ";".join(_recolour(rule).replace(": ", ":") for rule in kept))
    for key in ("fill", "stroke", "stop-color", "color"):
        if key in element.attrib:
            element.set(key, _recolour(f"{key}: {element.get(key)}").partition(": ")[2])
    for key in ("d", "x", "y", "points"):
        if key in element.attrib:
            numbers = re.sub(r"-?\d+\.\d+", _shorten, " ".join(element.get(key).split()))
            element.set(key, POLYLINE.sub(_in_steps, numbers))
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]


def _shorten(number: re.Match) -> str:
    """Round to a hundredth of a point, which is finer than any screen."""
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _in_steps(line: re.Match) -> str:
    """Write a line as steps from point to point, in tenths: half as long as the points."""
    points = [
        [round(10 * float(number)) for number in point.split()]
        for point in re.split("[ML]", line[0])[1:]
    ]
    steps = [
        f"{(x - from_x) / 10:g} {(y - from_y) / 10:g}"
        for (from_x, from_y), (x, y) in itertools.pairwise(points)
    ]
    return f"M{points[0][0] / 10:g} {points[0][1] / 10:g}l" + " ".join(steps)


def _recolour(rule: str) -> str:
    """Replace the colour of one style rule by the variable that it stands for."""
    name, _, value = rule.partition(": ")
    if not value.startswith("#") or name.endswith("-path"):
        return rule
    colour = value.lower()
    if len(colour) == len("#rgb"):
        colour = "#" + "".join(2 * digit for digit in colour[1:])
    if colour not in VARIABLES:
        raise ValueError(f"the figure has the colour {value}; use those of snippets.plotting")
    return f"{name}: var({VARIABLES[colour]})"


def _natural_width(root: ElementTree.Element) -> float:
    """Give the width in CSS pixels at which the figure was drawn (matplotlib writes points)."""
    width = root.get("width", "")
    if width.endswith("pt"):
        return float(width[:-2]) * 4 / 3
    return float(width.removesuffix("px") or root.get("viewBox").split()[2])
