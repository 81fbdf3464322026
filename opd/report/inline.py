"""A figure's SVG made fit to stand inside a page: the page's colours, ids of its own, and its content in words."""

import re
from xml.etree import ElementTree

import numpy as np
from matplotlib.markers import MarkerStyle
from matplotlib.transforms import Affine2D

from opd.report.figures import POINTS_IN, Drawing
from opd.report.style import VARIABLES, style

SVG, LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", LINK)

_COLOUR = re.compile("|".join(VARIABLES))
_FONT = re.compile("font-family: [^;]*;?")
_GROUP = re.compile(r"group-(\d+)-")


def inline(drawing: Drawing, description: str) -> str:
    """The `<svg>` element. Ids get the drawing's name as a prefix; what belongs to group N gets the class `group-N`."""
    root = ElementTree.fromstring(drawing.svg)
    parents = {child: parent for parent in root.iter() for child in parent}
    for element in list(root.iter()):
        unwanted = element.tag in {f"{{{SVG}}}style", f"{{{SVG}}}metadata"} or element.get("id", "").startswith("legend_")
        if unwanted:
            parents[element].remove(element)
            continue
        for name, value in list(element.attrib.items()):
            element.set(name, _attribute(name, value, drawing.name))
        if found := _GROUP.match(element.get("id", "").removeprefix(f"{drawing.name}-")):
            element.set("class", f"group-{found[1]}")
    width, height = (float(number) for number in root.attrib["viewBox"].split()[2:])
    height -= drawing.legend_in * POINTS_IN
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("viewBox", f"0 0 {width:g} {height:g}")
    root.set("role", "img")
    root.set("aria-label", f"{drawing.title}. {description}")
    return ElementTree.tostring(root, encoding="unicode")


def _attribute(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    if name == f"{{{LINK}}}href":
        return value.replace("#", f"#{prefix}-", 1)
    if name == "clip-path":
        return value.replace("url(#", f"url(#{prefix}-")
    if name == "style":
        return _FONT.sub("", _COLOUR.sub(lambda colour: VARIABLES[colour[0]], value))
    return value


def swatch(place: int) -> str:
    """The path of a group's mark, 3.5 units in radius around (14, 6), for the SVG of its line."""
    mark = MarkerStyle(style(place).mark)
    polygons = mark.get_path().transformed(mark.get_transform() + Affine2D().scale(7)).to_polygons()
    rings = [" ".join(f"{14 + x:.1f},{6 - y:.1f}" for x, y in np.asarray(polygon).tolist()) for polygon in polygons]
    return " ".join(f"M{ring}Z" for ring in rings)
