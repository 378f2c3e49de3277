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


def inline_svg(svg, *, prefix, alt):
    """Turn the SVG file `svg` into one line of HTML that follows the page's scheme and font.

    `prefix` makes its ids unique in the page, `alt` is its text for those who do not see it.
    Raises `ValueError` for a raster picture and for a colour that is not one of the book's.
    """
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        element.tag = NAMESPACE.sub("", element.tag)
        element.attrib = {NAMESPACE.sub("", key): value for key, value in element.attrib.items()}
        element.text, element.tail = (element.text or "").strip() or None, None
    drop(root)
    merge_squares(root)
    for element in root.iter():
        tidy(element)
    width, box = root.get("width", ""), root.get("viewBox")  # in points by matplotlib, of 4/3 px
    size = float(width[:-2]) * 4 / 3 if width.endswith("pt") else float(box.split()[2])
    root.attrib = {"viewBox": box, "style": f"--width:{size:.0f}", "role": "img"}
    root.attrib |= {"aria-label": alt, "stroke-linejoin": "round"}  # as its style element said
    drawing = prefix_ids(ElementTree.tostring(root, encoding="unicode"), prefix)
    return f'<div class="book-scroll" data-search-exclude>{drawing}</div>'


def drop(parent):
    """Remove what a page has no use for, and the groups that are empty then."""
    for child in list(parent):
        drop(child)
        empty = child.tag in ("g", "defs") and len(child) == 0
        unseen = child.tag == "path" and child.get("style") == "fill: none"
        if empty or unseen or child.tag in ("metadata", "style", "title"):
            parent.remove(child)


def merge_squares(root):
    """Join the squares of a heat map that look the same into one short path each."""
    for group in root.iterfind(".//g[@id]"):
        alike = {}
        for path in group.findall("path") if group.get("id").startswith("QuadMesh") else []:
            if square := SQUARE.fullmatch(" ".join(path.get("d").split())):
                x, y, to_x, to_y = map(float, square.groups())
                wide, high = to_x - x, to_y - y
                path.set("d", f"M{x:.1f} {y:.1f}h{wide:.6f}v{high:.6f}h{-wide:.6f}z")
            look = (path.get("style"), path.get("clip-path"), path.get("transform"))
            first = alike.setdefault(look, path)
            if first is not path:
                first.set("d", first.get("d") + path.get("d"))
            if first is not path or "fill-opacity: 0;" in path.get("style", ""):
                group.remove(path)


def prefix_ids(drawing, prefix):
    """Number the ids that something refers to, after the prefix; drop the others."""
    used = re.findall(r'(?:url\(|href=")#([^)"]+)', drawing)
    new = {name: f"{prefix}-{number}" for number, name in enumerate(dict.fromkeys(used))}
    ids = r' id="([^"]+)"'
    drawing = re.sub(ids, lambda m: f' id="{new[m[1]]}"' if m[1] in new else "", drawing)
    drawing = re.sub(r"url\(#([^)]+)", lambda m: f"url(#{new[m[1]]}", drawing)
    # Not plain href: Material's instant navigation sets that, and fails on a drawing.
    return re.sub(r' href="#([^"]+)', lambda m: f' xlink:href="#{new[m[1]]}', drawing)


def tidy(element):
    """Take the page's colours and font, and no more digits than can be seen."""
    if element.tag == "image" and len(element.get("href", "")) > LARGEST_RASTER:
        raise ValueError("the figure holds a raster picture; draw it as vectors (plotting.heatmap)")
    rules = [rule.strip() for rule in element.attrib.pop("style", "").split(";") if rule.strip()]
    rules = [recolour(rule) for rule in rules if not rule.startswith(("font-family", "font:"))]
    if rules:
        element.set("style", ";".join(rules))
    for key in ("fill", "stroke", "stop-color", "color"):
        if key in element.attrib:
            element.set(key, recolour(f"{key}: {element.get(key)}").partition(":")[2])
    for key in ("d", "x", "y", "points", "transform"):
        # A hundredth of a point is finer than any screen; a scale is not.
        if not re.search("scale|matrix", element.get(key, "scale")):
            short = " ".join(element.get(key).split())
            short = re.sub(r"-?\d+\.\d+", lambda m: f"{round(float(m[0]), 2):g}", short)
            element.set(key, POLYLINE.sub(in_steps, short))
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]


def in_steps(line):
    """Write a line as steps from point to point, in tenths: half as long as the points."""
    points = [point.split() for point in re.split("[ML]", line[0])[1:]]
    points = [(round(10 * float(x)), round(10 * float(y))) for x, y in points]
    moves = [(x - from_x, y - from_y) for (from_x, from_y), (x, y) in itertools.pairwise(points)]
    first, *steps = [f"{x / 10:g} {y / 10:g}" for x, y in [points[0], *moves]]
    return f"M{first}l" + " ".join(steps)


def recolour(rule):
    """Replace the colour of a style rule by the variable that it stands for."""
    name, _, value = rule.partition(": ")
    if value.startswith("#") and not name.endswith("-path"):
        colour = value.lower()
        colour = "#" + "".join(2 * digit for digit in colour[1:]) if len(colour) == 4 else colour
        if colour not in VARIABLES:
            raise ValueError(f"the figure has the colour {value}; use those of snippets.plotting")
        value = f"var({VARIABLES[colour]})"
    return f"{name}:{value}"
