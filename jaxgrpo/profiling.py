"""Where the time goes: a trace of a few iterations, and the seconds of the parts that the host can tell apart.

Inside one compiled function nothing can be timed from outside. So the profiled iterations run the step's two halves,
play and learning, each compiled on its own: the same computations, cut once. What is inside a half is in the trace,
under the names play, targets, rows, prefix, gradient and optimiser.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from jaxgrpo.records import write_json

Result = TypeVar("Result")

ROLLOUT, UPDATE, EVALUATION, CHECKPOINT = "rollout", "update", "evaluation", "checkpoint"

_WARM_UP = 2
"""Number of the session's iteration that compiles the two halves; the ones to be profiled follow."""


class Profile:
    """The profile of a session: `halves` asks for an iteration in halves, `part` times whatever it holds.

    `parts.json` in the folder has the numbers of the profiled iterations and, for each part, the seconds of every time
    it ran: the halves of the profiled iterations, all evaluations (the first one compiles) and all checkpoints (as long
    as they hold up the loop).
    """

    def __init__(self, folder: Path, iterations: int, say: Callable[[str], None], *, records: bool = True) -> None:
        """Profile so many iterations, from the session's third, and tell of them through `say`; 0 is none.

        Without `records` iterations run as they do where it is recorded, in another process, and nothing is.
        """
        self._folder, self._wanted, self._say, self._records = folder, iterations, say, records
        self._session = 0
        self._profiled: list[int] = []
        self._seconds: dict[str, list[float]] = {}
        self._tracing = False

    def halves(self) -> bool:
        """Whether the iteration that begins is to run in halves; to be asked once an iteration."""
        self._session += 1
        return self._wanted > 0 and _WARM_UP <= self._session <= _WARM_UP + self._wanted

    @contextlib.contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Around an iteration that runs in halves: its parts count, and it is traced, unless it is the first such."""
        if self._session == _WARM_UP:
            yield
            for half in ROLLOUT, UPDATE:
                del self._seconds[half]  # they compiled
            return
        if not self._tracing:
            self._start_trace()
        with jax.profiler.StepTraceAnnotation("iteration", step_num=number):
            yield
        self._profiled.append(number)
        if len(self._profiled) == self._wanted:
            self._stop_trace()
            self._tell()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is inside, as a part of that name."""
        began = time.monotonic()
        yield
        self._seconds.setdefault(name, []).append(time.monotonic() - began)

    def timed(self, name: str, call: Callable[[], Result]) -> Result:
        """What a function returns, when the devices have computed it, timed as a part."""
        with self.part(name):
            return jax.block_until_ready(call())

    def close(self) -> None:
        """End the trace where the session ended before it, and write what was timed."""
        if self._tracing:
            self._stop_trace()
            self._tell()
        elif self._profiled and self._records:
            self._write()  # with what was timed since
        elif self._wanted and not self._profiled:
            self._say(f"--profile {self._wanted}: the session ended before its third iteration; nothing is profiled.")

    def _start_trace(self) -> None:
        self._tracing = self._records
        if not self._records:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of the interpreter: slow, and nothing to see
        jax.profiler.start_trace(self._folder, profiler_options=options)

    def _stop_trace(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
        self._tracing = False

    def _write(self) -> None:
        seconds = {part: [round(s, 6) for s in times] for part, times in self._seconds.items()}
        write_json(self._folder / "parts.json", {"iterations": self._profiled, "seconds": seconds})

    def _tell(self) -> None:
        if not self._profiled or not self._records:
            return
        self._write()
        self._say(f"Profile of iterations {self._profiled[0]} to {self._profiled[-1]}, trace in {self._folder}:")
        for line in table(self._seconds):
            self._say(line)


def table(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Lines with the mean seconds of each part, and of the halves their share of an iteration.

    Of evaluations and checkpoints the first is left out, which compiles and sets up; so they are absent until a second.
    """
    rollout, update = np.mean(seconds[ROLLOUT]), np.mean(seconds[UPDATE])
    lines = [f"  {'part':<12}{'seconds':>9}{'share':>7}"]
    for part, mean in ((ROLLOUT, rollout), (UPDATE, update)):
        lines.append(f"  {part:<12}{mean:>9.3f}{mean / (rollout + update):>7.0%}")
    for part in (EVALUATION, CHECKPOINT):
        if times := seconds.get(part, ())[1:]:
            lines.append(f"  {part:<12}{np.mean(times):>9.3f}")
    return lines
