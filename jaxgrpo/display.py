"""What a person sees of a run: a live bar on a terminal, a line now and then elsewhere."""

import datetime
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINES = 10


class Display:
    """Progress of one session. Everything goes to standard output; `quiet` shows nothing."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        """Uses the process's own standard output unless another console is given."""
        self.console = console or Console(quiet=quiet, highlight=False)
        self._progress: Progress | None = None

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self.console.print(line, markup=False, soft_wrap=True)

    def start(self, done: int, total: int) -> None:
        """Begin the bar of a run of `total` iterations, `done` of them already there."""
        self._first, self._total, self._began = done, total, time.monotonic()
        if not self.console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("[bold]iteration"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[values]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            expand=True,
        )
        self._task = self._progress.add_task("", total=total, completed=done, values="compiling")
        self._progress.start()

    def row(self, row: Mapping[str, Any]) -> None:
        """Show the metrics of an iteration."""
        iteration = row["iteration"]
        if self._progress:
            self._progress.update(self._task, completed=iteration, values=_values(row))
        elif self._prints(iteration):
            self.say(f"iteration {iteration}/{self._total}  {_values(row)}  ETA {self._eta(iteration)}")

    def stop(self) -> None:
        """End the bar, leaving its last state on the screen; also from another thread."""
        if self._progress:
            self._progress.stop()
            self._progress = None

    def _prints(self, iteration: int) -> bool:
        every = max(1, self._total // _LINES)
        return iteration == self._first + 1 or iteration == self._total or iteration % every == 0

    def _eta(self, iteration: int) -> str:
        seconds = (time.monotonic() - self._began) / (iteration - self._first) * (self._total - iteration)
        return str(datetime.timedelta(seconds=round(seconds)))


def _values(row: Mapping[str, Any]) -> str:
    shown = [f"return {row['return_mean']:.3f}", f"success {row['success_rate']:.3f}"]
    if "tokens_per_s" in row:
        shown.append(f"{row['tokens_per_s']:,.0f} tokens/s")
    return "  ".join(shown)
