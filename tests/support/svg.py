"""Boxes and numbers in a drawn schedule."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

_SVG = "{http://www.w3.org/2000/svg}"
KINDS = {"#56b4e9": "forward", "#e69f00": "backward", "#009e73": "weight"}
"""Kind of pass of a single chunk, by color."""


@dataclass(frozen=True)
class Box:
    """A rectangle in points, its color ("url" if it is hatched), and the number at its center ("" without a number)."""

    color: str
    left: float
    right: float
    top: float
    bottom: float
    text: str


def read_rows(path: Path) -> list[list[Box]]:
    """Read the boxes of each row of a picture, from the top and from the left."""
    root = ET.parse(path).getroot()
    single = [text for text in root.iter(f"{_SVG}text") if "x" in text.attrib]  # others have several lines
    numbers = [(float(text.attrib["x"]), float(text.attrib["y"]), text.text or "") for text in single]
    rows: dict[float, list[Box]] = {}
    for group in root.iter(f"{_SVG}g"):
        if not group.get("id", "").startswith("PolyCollection"):
            continue
        for path_element in group.iter(f"{_SVG}path"):
            corners = [float(number) for number in re.findall(r"-?[\d.]+", path_element.attrib["d"])]
            left, right = min(corners[::2]), max(corners[::2])
            top, bottom = min(corners[1::2]), max(corners[1::2])
            center = (left + right) / 2
            inside = [text for x, y, text in numbers if abs(x - center) < 0.01 and top < y < bottom]
            color = re.search(r"fill: (#[0-9a-f]{6}|url)", path_element.attrib["style"])
            assert color is not None
            rows.setdefault(top, []).append(Box(color[1], left, right, top, bottom, "".join(inside)))
    return [sorted(rows[top], key=lambda box: box.left) for top in sorted(rows)]


def read_texts(path: Path) -> list[str]:
    """Read the lines of all texts of a picture."""
    root = ET.parse(path).getroot()
    return [line.strip() for text in root.iter(f"{_SVG}text") for line in text.itertext() if line.strip()]
