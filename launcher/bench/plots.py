"""Plots as SVG elements, without a library: lines over two linear axes, and bars."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 42
_STYLE = "text{font:11px system-ui,sans-serif;fill:#777}"
COLOURS = ("#2f7fd1", "#c2410c", "#3f7d20", "#a855c9", "#8a6d00", "#0f766e")
"""Colours whose contrast with white and with black is 3 or more."""

_ROUND = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10)

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axes:
    """Names of the axes."""

    title: str
    across: str
    up: str


@dataclass(frozen=True)
class Plot:
    """One figure."""

    title: str
    svg: str = ""
    """Empty where there is nothing to show."""


def lines(axes: Axes, series: dict[str, Points]) -> Plot:
    """One line for each name."""
    points = [point for each in series.values() for point in each]
    if not points:
        return Plot(axes.title)
    right, top = _nice(max(x for x, _ in points)), _nice(max(y for _, y in points))
    drawn = [_frame(axes, right, top)]
    for index, (name, each) in enumerate(series.items()):
        path = " ".join(f"{_x(x / right):.1f},{_y(y / top):.1f}" for x, y in each)
        colour = COLOURS[index % len(COLOURS)]
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        drawn.append(_label(index, colour, name) if len(series) > 1 else "")
    return _figure(axes, drawn)


def bars(axes: Axes, values: Sequence[tuple[str, float]]) -> Plot:
    """One bar for each pair of name and value, in this order."""
    if not values:
        return Plot(axes.title)
    top = _nice(max(value for _, value in values))
    step = (WIDTH - LEFT - RIGHT) / len(values)
    drawn = [_frame(axes, None, top)]
    for index, (name, value) in enumerate(values):
        x, y = LEFT + index * step, _y(value / top)
        size = f'x="{x + 0.1 * step:.1f}" y="{y:.1f}" width="{0.8 * step:.1f}" height="{HEIGHT - BOTTOM - y:.1f}"'
        drawn.append(f'<rect {size} fill="{COLOURS[0]}"><title>{escape(name)}: {value:.4g}</title></rect>')
        if len(values) <= 8:
            drawn.append(_text(x + step / 2, HEIGHT - BOTTOM + 16, name[:16], "middle"))
    return _figure(axes, drawn)


def _figure(axes: Axes, drawn: Sequence[str]) -> Plot:
    title = escape(axes.title)
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}"'
    return Plot(axes.title, f"<svg {head}><style>{_STYLE}</style>{''.join(drawn)}</svg>")


def _frame(axes: Axes, right: float | None, top: float) -> str:
    """Axes with ticks; without numbers across where `right` is None."""
    drawn = [
        f'<path d="M{LEFT},{TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#888"/>',
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, axes.across, "middle"),
        f'<text transform="translate(13,{(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(axes.up)}</text>",
    ]
    for tick in range(5):
        y = _y(tick / 4)
        drawn.append(f'<path d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}" stroke="#8883"/>')
        drawn.append(_text(LEFT - 6, y + 4, f"{top * tick / 4:.4g}", "end"))
        if right is not None:
            drawn.append(_text(_x(tick / 4), HEIGHT - BOTTOM + 16, f"{right * tick / 4:.4g}", "middle"))
    return "".join(drawn)


def _label(index: int, colour: str, name: str) -> str:
    y = HEIGHT - BOTTOM - 12 - 16 * index  # a distribution leaves this corner free
    line = f'<path d="M{WIDTH - 150},{y - 4}h18" stroke="{colour}" stroke-width="3"/>'
    return line + _text(WIDTH - 126, y, name[:20], "start")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _nice(value: float) -> float:
    """The next round number: a quarter of it has few digits."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in _ROUND if factor * power >= value * (1 - 1e-9))
