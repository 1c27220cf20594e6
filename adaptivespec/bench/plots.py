"""The report's figures, as SVG."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adaptivespec.bench import extra
from adaptivespec.bench.arms import PLAIN
from adaptivespec.bench.summary import ALL, Cell

Draw = Callable[[Any, Sequence[Cell]], bool]


def check() -> None:
    """Raises ConfigError without matplotlib: before anything is measured, not after."""
    extra.load("matplotlib.figure", "the report's plots")


def draw_all(cells: Sequence[Cell], folder: Path) -> list[tuple[str, str]]:
    """Write the figures that there are values for; (file name, caption) of each."""
    library = extra.load("matplotlib", "the report's plots")
    figures = extra.load("matplotlib.figure", "the report's plots")
    drawn = []
    for name, (draw, caption) in FIGURES.items():
        with library.rc_context({"svg.hashsalt": name, "font.size": 9, "axes.axisbelow": True}):
            figure = figures.Figure(figsize=(9, 4), layout="constrained")
            axes = figure.subplots()
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="0.9")
            if draw(axes, cells):
                figure.legend(loc="outside right upper", fontsize=8, frameon=False)
                figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
                drawn.append((f"{name}.svg", caption))
    return drawn


def _first(cells: Sequence[Cell]) -> list[Cell]:
    """Those of the lowest concurrency."""
    lowest = min(c.concurrency for c in cells)
    return [c for c in cells if c.concurrency == lowest]


def _whole(cells: Sequence[Cell]) -> list[Cell]:
    """Those of all sets together, or of the only one."""
    return [c for c in cells if c.set == ALL] or list(cells)


def _colours(cells: Sequence[Cell]) -> dict[str, str]:
    """By arm, the same in every figure."""
    arms = [arm for arm in dict.fromkeys(c.arm for c in cells) if arm != PLAIN]
    return {PLAIN: "0.5"} | {arm: f"C{i}" for i, arm in enumerate(arms)}


def _speed(axes: Any, cells: Sequence[Cell]) -> bool:
    colours = _colours(cells)
    cells = [c for c in _first(cells) if c.vs_plain is not None and c.arm != PLAIN]
    sets = list(dict.fromkeys(c.set for c in cells))
    arms = list(dict.fromkeys(c.arm for c in cells))
    width = 0.8 / max(1, len(arms))
    for i, arm in enumerate(arms):
        for c in (c for c in cells if c.arm == arm):
            value, low, high = c.vs_plain.value, c.vs_plain.low, c.vs_plain.high  # type: ignore[union-attr]
            errors = None if low is None or high is None else [[value - low], [high - value]]
            axes.bar(
                sets.index(c.set) + (i - (len(arms) - 1) / 2) * width,
                value,
                width,
                yerr=errors,
                color=colours[arm],
                label=arm if c.set == sets[0] else None,
            )
    axes.axhline(1, color="0.4", linewidth=1)
    axes.set_xticks(range(len(sets)), sets)
    axes.set_ylabel("tokens/s, ratio to plain decoding")
    return bool(cells)


def _ladder(axes: Any, cells: Sequence[Cell]) -> bool:
    cells, colours = _whole(cells), _colours(cells)
    levels = sorted({c.concurrency for c in cells})
    for arm in dict.fromkeys(c.arm for c in cells):
        points = [(c.concurrency, c.tokens_per_s) for c in cells if c.arm == arm]
        axes.plot(*zip(*points, strict=True), marker="o", color=colours[arm], label=arm)
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, map(str, levels))
    axes.set(xlabel="requests at once", ylabel="tokens/s of all together", ylim=(0, None))
    return len(levels) > 1


def _positions(axes: Any, cells: Sequence[Cell]) -> bool:
    colours = _colours(cells)
    cells = [c for c in _whole(_first(cells)) if c.accepted_at]
    for c in cells:
        rates = c.accepted_at or []
        axes.plot(range(1, len(rates) + 1), rates, marker="o", color=colours[c.arm], label=c.arm)
    axes.set(xlabel="position in the draft", ylabel="share of steps that accept it", ylim=(0, 1))
    return bool(cells)


def _steps(axes: Any, cells: Sequence[Cell]) -> bool:
    cells = [c for c in _whole(_first(cells)) if c.step]
    bottom = [0.0] * len(cells)
    for part in ("verify", "draft", "transfer", "other"):
        heights = [1000 * (c.step or {})[part] for c in cells]
        if any(heights):
            axes.barh([c.arm for c in cells], heights, left=bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlabel("decoding step, ms")
    return bool(cells)


def _quality(axes: Any, cells: Sequence[Cell]) -> bool:
    cells, colours = _whole(_first(cells)), _colours(cells)
    scored = any(c.accuracy for c in cells)
    axes.axvline(1, color="0.4", linewidth=1)
    for c in cells:
        value = c.accuracy if scored else c.agreement
        if c.vs_plain is not None and value is not None:
            axes.plot(c.vs_plain.value, value, "o", color=colours[c.arm], label=c.arm)
    axes.set_xlabel("tokens/s, ratio to plain decoding")
    axes.set_ylabel("accuracy" if scored else "agreement with the baseline")
    axes.set_ylim(-0.03, 1.03)
    return len(axes.lines) > 2


FIGURES: dict[str, tuple[Draw, str]] = {
    "speed": (_speed, "Speed against plain decoding; lines are 95 % intervals"),
    "ladder": (_ladder, "Speed by requests at once"),
    "quality": (_quality, "What speed costs in answers"),
    "positions": (_positions, "How far drafts are accepted"),
    "steps": (_steps, "Where the time of a decoding step goes"),
}
