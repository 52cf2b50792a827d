"""How a run ends: its exit codes, and a clean stop on SIGINT and SIGTERM even while compiled code runs."""

import enum
import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType

SKIPPED_LIMIT = 20
"""Iterations in a row without a finite update after which a run is given up."""


class Exit(enum.IntEnum):
    """Exit codes of `jaxgrpo`."""

    DONE = 0
    DOES_NOT_FIT = 1
    USER_ERROR = 2
    NON_FINITE = 3
    PEER_LOST = 75
    INTERRUPTED = 128 + signal.SIGINT
    PREEMPTED = 128 + signal.SIGTERM

    @property
    def meaning(self) -> str:
        """One line for help pages."""
        return _MEANINGS[self]


_MEANINGS = {
    Exit.DONE: "done: all iterations, or --max-seconds are over",
    Exit.DOES_NOT_FIT: "jaxgrpo plan: it does not fit; with a traceback, from any command: a fault of jaxgrpo",
    Exit.USER_ERROR: "a wrong option or file, a full disk, a store out of reach; one line on standard error says which",
    Exit.NON_FINITE: f"given up: {SKIPPED_LIMIT} iterations in a row had no finite gradient",
    Exit.PEER_LOST: "another process of a run on several hosts was lost; go on with --resume once all are there again",
    Exit.INTERRUPTED: "interrupted (SIGINT), a checkpoint is written; a second SIGINT aborts at once, without",
    Exit.PREEMPTED: "preempted (SIGTERM), a checkpoint is written",
}

_WATCHED = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While entered, remembers the first SIGINT or SIGTERM; a further SIGINT ends the process at once.

    Python runs its own handlers only between bytecodes, which may be minutes apart when the main thread waits for the
    device. So a thread reads the signals from the descriptor to which the interpreter writes them as they come, and
    does all there is to do; the handler notes the signal too, so that the main thread knows of it from then on
    whether or not the thread has had its turn. Outside the main thread, where Python takes no handlers, nothing is
    watched.
    """

    def __init__(self, on_first: Callable[[signal.Signals], None], on_abort: Callable[[], None]) -> None:
        """Both callbacks run in the watching thread."""
        self.received: signal.Signals | None = None
        self._on_first, self._on_abort = on_first, on_abort
        self._active = False

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._active = True
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous_descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._note) for number in _WATCHED}
        self._thread = threading.Thread(target=self._watch, name="stop-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._active:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_descriptor)
        os.close(self._writer)  # ends the thread: it reads the end of the file
        self._thread.join()
        os.close(self._reader)
        self._active = False

    def _note(self, number: int, _: object) -> None:
        if self.received is None:
            self.received = signal.Signals(number)

    def _watch(self) -> None:
        announced = False
        while byte := os.read(self._reader, 1):
            if byte[0] not in _WATCHED:
                continue
            if not announced:
                announced = True
                self._note(byte[0], None)
                self._on_first(signal.Signals(byte[0]))
            elif byte[0] == signal.SIGINT:
                self._on_abort()
                os._exit(Exit.INTERRUPTED)
