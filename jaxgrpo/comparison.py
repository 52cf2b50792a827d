"""Comparing variants of training: every variant on every game with every seed, as a table and a picture.

A run that is finished is not run again, and one that was stopped goes on where it was. What is compared is the mean
return on held-out episodes. Intervals are 95% Student intervals over seeds, and differences from the first variant are
taken seed by seed, so that what a seed makes easy or hard for all of them drops out.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgrpo import report
from jaxgrpo.config import resolve
from jaxgrpo.records import RunFolder, read_rows
from jaxgrpo.stopping import Exit
from jaxgrpo.trainer import Run, train

# Two-sided 95% quantiles of Student's distribution, by degrees of freedom.
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        game: its name.
        variant: name of what was varied.
        seed: of the run.
        iterations: at which held-out episodes were played.
        episodes: that the run had played in training by then.
        returns: mean return of each of these evaluations.
        seconds: training and evaluation together.
    """

    game: str
    variant: str
    seed: int
    iterations: np.ndarray
    episodes: np.ndarray
    returns: np.ndarray
    seconds: float

    @property
    def final(self) -> float:
        """Mean held-out return at the end."""
        return float(self.returns[-1])

    @property
    def mean(self) -> float:
        """Mean held-out return over all evaluations after the first: how much was had on the way."""
        return float(self.returns[1:].mean())


def run_all(
    variants: Mapping[str, Mapping[str, Any]],
    games: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    out: Path,
) -> list[Result] | Exit:
    """Trains every variant on every game with every seed, each run in a folder of its own below `out`.

    Args:
        variants: options of each by name; they override those of the games.
        games: options of each by name, with its `game` where that is not the name itself.
        seeds: of the runs.
        out: folder for all runs.

    Returns:
        The results; or how a run ended that was stopped, after which the same call goes on.
    """
    results = []
    for seed in seeds:
        for game, for_game in games.items():
            for variant, options in variants.items():
                folder = out / game / variant.replace(" ", "-") / f"seed{seed}"
                given = {"game": game, **for_game, **options, "seed": seed}
                run = train_in(folder, given)
                if run.after is None or run.after["iteration"] != run.iteration or run.exit != Exit.DONE:
                    return run.exit
                results.append(_read(game, variant, seed, RunFolder(folder)))
    return results


def train_in(folder: Path, options: Mapping[str, Any]) -> Run:
    """Trains in a folder, or goes on with the run that is there; one that is finished is only read."""
    return train(resolve({**options, "out": str(folder), "resume": RunFolder(folder).holds_run}))


def _read(game: str, variant: str, seed: int, folder: RunFolder) -> Result:
    evaluations = read_rows(folder.evaluations)
    seconds = sum(row["seconds"] for row in [*evaluations, *read_rows(folder.metrics)])
    iterations, returns = (np.array([row[name] for row in evaluations]) for name in ("iteration", "return_mean"))
    return Result(game, variant, seed, iterations, iterations * folder.read_config().episodes, returns, seconds)


def present(results: Sequence[Result], out: Path, first: str) -> None:
    """Writes `table.md` and `curves.png` of results into the folder of their runs, and prints the table."""
    draw(results, out / "curves.png")
    table = markdown(results, first)
    (out / "table.md").write_text(table)
    print(table)
    print(f"Files in {out}: table.md, curves.png, and a folder a run")


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Mean and half of its 95% Student interval over seeds; the half is infinite for a single one."""
    array = np.array([*values], float)
    if array.size < 2:
        return float(array.mean()), float("inf")
    quantile = _T95.get(array.size - 1, 1.96)
    return float(array.mean()), float(quantile * array.std(ddof=1) / np.sqrt(array.size))


def markdown(results: Sequence[Result], first: str) -> str:
    """A table for each game: held-out return at the end and on the way, and differences from the variant `first`."""
    lines = []
    for game in _names(results, "game"):
        lines += [
            f"**{game}**",
            "",
            f"| variant | at the end | each seed | against {first} | on the way | against {first} | seconds a run |",
            "|---|---|---|---|---|---|---|",
        ]
        of_game = [r for r in results if r.game == game]
        base = {r.seed: r for r in of_game if r.variant == first}
        for variant in _names(of_game, "variant"):
            runs = [r for r in of_game if r.variant == variant]
            cells = [
                variant,
                _pm(r.final for r in runs),
                ", ".join(f"{r.final:.2f}" for r in runs),
                "" if variant == first else _pm(r.final - base[r.seed].final for r in runs),
                _pm(r.mean for r in runs),
                "" if variant == first else _pm(r.mean - base[r.seed].mean for r in runs),
                f"{min(r.seconds for r in runs):.0f}-{max(r.seconds for r in runs):.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def draw(results: Sequence[Result], path: Path) -> None:
    """Draws a panel a game: the mean over seeds of the held-out return, in a band from the lowest to the highest."""
    games, variants = _names(results, "game"), _names(results, "variant")
    with report.figure(path, 1, len(games), size=(6.2 * len(games), 4.2)) as (figure, axes):
        for axis, game in zip(axes.flat, games, strict=True):
            for number, variant in enumerate(variants):
                runs = [r for r in results if (r.game, r.variant) == (game, variant)]
                returns = np.stack([r.returns for r in runs])
                color = report.COLORS[number % len(report.COLORS)]
                axis.fill_between(runs[0].episodes, returns.min(0), returns.max(0), color=color, alpha=0.1, lw=0)
                axis.plot(runs[0].episodes, returns.mean(0), color=color, lw=1.8, label=variant)
            axis.set_title(f"{game}: held-out return")
            axis.set_xlabel("episodes played in training")
        axes.flat[0].legend(loc="upper left")
        figure.suptitle(f"Mean of {len({r.seed for r in results})} seeds, lowest to highest shaded", x=0.01, ha="left")


def _names(results: Iterable[Result], attribute: str) -> list[str]:
    return list(dict.fromkeys(getattr(r, attribute) for r in results))


def _pm(values: Iterable[float]) -> str:
    mean, half = interval(values)
    return f"{mean:.2f} ± {half:.2f}" if np.isfinite(half) else f"{mean:.2f}"
