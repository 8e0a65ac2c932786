"""Colours as WCAG and the eye see them, and the ones that the style sheets name."""

import re
from importlib.resources import files

import numpy as np

STATIC = files("outdraft.dashboard") / "static"
SCHEMES = {"light": 0, "dark": 1}

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}

_TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
_WHITE = _TO_XYZ @ np.ones(3)


def style(name: str) -> str:
    return (STATIC / name).read_text()


def palette(scheme: str) -> dict[str, np.ndarray]:
    """Every custom property that is light-dark(#..., #...), as sRGB from 0 to 1."""
    pairs = re.findall(
        r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", style("base.css") + style("origins.css")
    )
    return {name: _parse((light, dark)[SCHEMES[scheme]]) for name, light, dark in pairs}


def tint_share(scheme: str) -> float:
    """How much of an origin's colour is behind its tokens."""
    shares = re.findall(r"var\(--origin\) (\d+)%, var\(--surface\)", style("origins.css"))
    return int(shares[SCHEMES[scheme]]) / 100


def contrast(left: np.ndarray, right: np.ndarray) -> float:
    """WCAG 2's contrast ratio, from 1 to 21."""
    low, high = sorted(float(_TO_XYZ[1] @ _linear(colour)) for colour in (left, right))
    return (high + 0.05) / (low + 0.05)


def difference(left: np.ndarray, right: np.ndarray, deficiency: str) -> float:
    """CIE 1976 distance of two colours, as somebody with the deficiency sees them."""
    matrix = DEFICIENCIES[deficiency]
    return float(np.linalg.norm(_lab(matrix @ _linear(left)) - _lab(matrix @ _linear(right))))


def _parse(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])


def _linear(srgb: np.ndarray) -> np.ndarray:
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def _lab(linear: np.ndarray) -> np.ndarray:
    relative = _TO_XYZ @ np.clip(linear, 0, 1) / _WHITE
    x, y, z = np.where(relative > 0.008856, np.cbrt(relative), 7.787 * relative + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
