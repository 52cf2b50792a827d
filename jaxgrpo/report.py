"""Pictures of a run, drawn from its records alone."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxgrpo.records import RunFolder, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[dict[str, Any]]

_BLUE, _ORANGE, _GREY = "#1f6fb2", "#d9622b", "#5a6270"
COLORS = (_BLUE, _ORANGE, "#3a8f5c", "#8a5bb0", "#b3892a", "#2f9aa0", "#9c4a62")
"""For the things that a picture compares, in their order."""
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "legend.frameon": False,
}


def draw_curve(folder: RunFolder) -> Path:
    """Draws the run in a folder to its `curve.png`: success with the held-out evaluations, return, and health.

    Every panel shows the iterations as they were, faint, and a running mean over a twentieth of them.
    """
    rows, evaluations = read_rows(folder.metrics), read_rows(folder.evaluations)
    with figure(folder.curve, 2, 3, size=(13.0, 6.4)) as (drawn, axes):
        _draw_success(axes[0, 0], rows, evaluations)
        _draw_panel(axes[0, 1], rows, "return_mean", "Return per episode (± 1 std)", spread="return_std")
        _draw_panel(axes[0, 2], rows, "episode_length", "Steps per episode")
        _draw_panel(axes[1, 0], rows, "unreadable_rate", "Unreadable replies", share=True)
        _draw_panel(axes[1, 1], rows, "entropy", "Entropy per token (nats)", floor=True)
        _draw_panel(axes[1, 2], rows, "grad_norm", "Gradient norm", floor=True)
        for axis in axes[1]:
            axis.set_xlabel("iteration")
        config = folder.read_config()
        drawn.suptitle(f"{config.game} · {config.algorithm} · {config.model} · seed {config.seed}", x=0.01, ha="left")
    return folder.curve


@contextlib.contextmanager
def figure(path: Path, rows: int, columns: int, *, size: tuple[float, float]) -> Iterator[tuple["Figure", np.ndarray]]:
    """A figure of `rows` by `columns` panels, `size` in inches, written to `path` in one go when it is left whole."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        drawn, axes = plt.subplots(rows, columns, figsize=size, sharex="col", layout="constrained", squeeze=False)
        try:
            yield drawn, axes
            beside = path.with_name(f".{path.name}.new")
            drawn.savefig(beside, dpi=130, format="png")
            beside.replace(path)
        finally:
            plt.close(drawn)


def _draw_success(axis: "Axes", rows: Rows, evaluations: Rows) -> None:
    _draw_panel(axis, rows, "success_rate", "Success", share=True)
    if not evaluations:
        return
    iterations = [row["iteration"] for row in evaluations]
    rates = np.array([row["success_rate"] for row in evaluations], float)
    episodes = np.array([row["episodes"] for row in evaluations], float)
    error = 1.96 * np.sqrt(rates * (1 - rates) / episodes)
    axis.errorbar(iterations, rates, yerr=error, fmt="o-", color=_ORANGE, lw=1, capsize=3, label="held out (95 %)")
    for row in (evaluations[0], evaluations[-1]):
        place = (row["iteration"], row["success_rate"])
        axis.annotate(
            f"{row['success_rate']:.3f}", place, (0, 9), textcoords="offset points", ha="center", color=_ORANGE
        )
    axis.legend(loc="upper left")


def _draw_panel(
    axis: "Axes",
    rows: Rows,
    name: str,
    title: str,
    *,
    spread: str | None = None,
    share: bool = False,
    floor: bool = False,
) -> None:
    """One metric: raw values faint, running mean strong; `spread` shades one standard deviation of the episodes."""
    axis.set_title(title)
    x, y = _series(rows, "iteration"), _series(rows, name)
    if share:
        axis.set_ylim(-0.03, 1.03)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if not np.isfinite(y).any():
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color=_GREY)
        return
    if spread is not None:
        deviation = _smooth(_series(rows, spread))
        axis.fill_between(x, _smooth(y) - deviation, _smooth(y) + deviation, color=_BLUE, alpha=0.12, lw=0)
    axis.plot(x, y, color=_BLUE, alpha=0.35, lw=0.9)
    axis.plot(x, _smooth(y), color=_BLUE, lw=1.9, label="training", marker="o" if len(x) == 1 else None)
    if floor:
        axis.set_ylim(bottom=0)


def _series(rows: Rows, name: str) -> np.ndarray:
    return np.array([row.get(name) for row in rows], dtype=float)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a centred window of a twentieth of the run, narrower at its ends; what is not finite is left out."""
    half = max(0, len(values) // 40)
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return np.array([np.mean(w[np.isfinite(w)]) if np.isfinite(w).any() else np.nan for w in windows])
