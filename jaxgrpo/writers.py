"""Where rows of metrics go: the run's own JSON lines always, TensorBoard and Weights & Biases where asked for.

The JSON lines are the record and may not fail. The others are views of it: one that fails is given up, not the run.
"""

import contextlib
import importlib
import importlib.util
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from jaxgrpo.config import ConfigError, TrainConfig, flatten
from jaxgrpo.records import JsonLines, KeptRows, RunFolder
from jaxgrpo.storage import AnyPath

Kind = Literal["train", "held-out"]
"""What a row tells of: the episodes of a training iteration, or an evaluation on held-out episodes."""

Row = Mapping[str, Any]


@runtime_checkable
class Writer(Protocol):
    """Takes the rows of a run as they come, each with its "iteration"; of one kind, iterations rise."""

    def begin(self, after: int) -> None:
        """The session goes on after so many iterations: rows of later ones, written before, do not count any more."""

    def write(self, kind: Kind, row: Row) -> None:
        """Take one row."""

    def sync(self) -> None:
        """Have all rows on the disk, as far as that is for the writer to say."""

    def close(self) -> None:
        """Finish what was begun."""


def require_views(config: TrainConfig) -> None:
    """Sees that there can be all that a configuration asks for to look at its run.

    Raises:
        ConfigError: a package is missing, and the line names the extra that brings it; or the run's folder is not on
            this machine, where it has to be for files that grow.
    """
    for name in ("tensorboard", "wandb"):
        if getattr(config.run, name) and importlib.util.find_spec(name) is None:
            raise ConfigError(f"--{name}: the package is missing; install it with: pip install 'jaxgrpo[{name}]'")
    if "://" not in str(config.run.out):
        return
    for name in ("tensorboard", "export_episodes", "profile"):
        if getattr(config.run, name):
            raise ConfigError(
                f"--{name.replace('_', '-')}: writes into a folder on this machine, and --out is {config.run.out}; "
                "leave out one of the two (--wandb can do with both)."
            )


def open_views(config: TrainConfig, folder: RunFolder, say: Callable[[str], None]) -> Sequence[Writer]:
    """The writers a configuration asks for beside the JSON lines, each given up with a line where it fails.

    Args:
        config: of the run.
        folder: of the run.
        say: shows a line.

    Raises:
        ConfigError: Weights & Biases refuses to begin.
    """
    views: list[Writer] = []
    if config.run.tensorboard:
        views.append(_MayFail("TensorBoard", TensorBoard(Path(folder.tensorboard)), say))
    if config.run.wandb:
        views.append(_MayFail("Weights & Biases", WeightsAndBiases(folder, config), say))
    return views


class JsonRows:
    """The record: rows of each kind in a file of JSON lines of its own."""

    def __init__(self, files: Mapping[Kind, JsonLines | KeptRows]) -> None:
        """Write into these files, which hold no more rows than count."""
        self._files = files

    def begin(self, after: int) -> None:
        """Nothing: the files were cut as they were opened."""

    def write(self, kind: Kind, row: Row) -> None:
        """Append the row; it is safe from a kill when this returns."""
        self._files[kind].append(row)

    def sync(self) -> None:
        """Have all rows on the disk, safe from a power cut."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


class TensorBoard:
    """Event files with a scalar KIND/NAME for every number of a row, at the row's iteration.

    Written as they come, without TensorFlow and without a thread. Every session has a file of its own, which begins
    with a start mark at its first iteration: readers drop what earlier files hold of that iteration and later ones.
    """

    def __init__(self, folder: Path) -> None:
        """Open a new file in a folder of event files."""
        # Their classes are made when they are imported, out of a static checker's sight.
        event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._mark, self._summary = event.Event, event.SessionLog, summary.Summary
        folder.mkdir(parents=True, exist_ok=True)
        # Readers take the files of a folder in the order of their names.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}"
        self._file = (folder / name).open("xb")
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")

    def begin(self, after: int) -> None:
        """Write the start mark."""
        # An evaluation at iteration 0 comes before the first iteration.
        self._add(step=after + 1 if after else 0, session_log=self._mark(status=self._mark.START))

    def write(self, kind: Kind, row: Row) -> None:
        """Add the row's numbers; they are with the operating system when this returns."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in _scalars(kind, row)]
        self._add(step=row["iteration"], summary=self._summary(value=values))

    def sync(self) -> None:
        """Have all events on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._records.flush()


class WeightsAndBiases:
    """A W&B run with KIND/NAME for every number of a row, at the row's iteration as its step.

    `WANDB_MODE`, `WANDB_PROJECT`, `WANDB_NAME` and the like hold. Sessions of a run share the run's id, which is kept
    in its folder. W&B takes no step twice: rows that it has and that are computed again after a resume, the same as
    before, are left out.
    """

    def __init__(self, folder: RunFolder, config: TrainConfig) -> None:
        """Begin a W&B run, or go on with it.

        Raises:
            ConfigError: W&B refuses, for want of a login for instance.
        """
        import wandb

        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "jaxgrpo"),
                name=os.environ.get("WANDB_NAME", folder.path.name),
                dir=None if "://" in str(folder.path) else str(folder.path),  # else ./wandb, as W&B has it
                id=_run_id(folder.wandb / "run-id", new=not config.run.resume),
                resume="allow",
                config=flatten(config),
                allow_val_change=True,  # a resumed run may be made longer
                settings=wandb.Settings(console="off"),  # it would catch the progress bar
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                f"--wandb: {reason}; with WANDB_MODE=offline it needs no account and only writes files."
            ) from error
        self._first = self._run.step

    def begin(self, after: int) -> None:
        """Nothing: a row that W&B has cannot be taken back, and need not, see above."""

    def write(self, kind: Kind, row: Row) -> None:
        """Hand the row over; W&B writes and uploads in a process of its own."""
        if row["iteration"] >= self._first:
            self._run.log(dict(_scalars(kind, row)), step=row["iteration"])

    def sync(self) -> None:
        """Nothing: what W&B was given is its own affair."""

    def close(self) -> None:
        """Wait until W&B has everything, and have it know whether the session ends for an error."""
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))


def _run_id(file: AnyPath, *, new: bool) -> str:
    """The id in a file, or a new one written into it."""
    if not new and file.exists():
        return file.read_text().strip()
    file.parent.mkdir(parents=True, exist_ok=True)
    name = secrets.token_hex(4)
    file.write_text(f"{name}\n")
    return name


class _MayFail:
    """A writer whose first failure is told in a line and is the last that is heard of it."""

    def __init__(self, name: str, writer: Writer, say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        self._writer: Writer | None = writer

    def begin(self, after: int) -> None:
        self._attempt(lambda writer: writer.begin(after))

    def write(self, kind: Kind, row: Row) -> None:
        self._attempt(lambda writer: writer.write(kind, row))

    def sync(self) -> None:
        self._attempt(lambda writer: writer.sync())

    def close(self) -> None:
        self._attempt(lambda writer: writer.close())

    def _attempt(self, act: Callable[[Writer], None]) -> None:
        if self._writer is None:
            return
        try:
            act(self._writer)
        except Exception as error:
            failed, self._writer = self._writer, None
            reason = " ".join(str(error).split()) or type(error).__name__
            self._say(f"{self._name} fails ({reason}): the run goes on without it; metrics.jsonl has every row.")
            with contextlib.suppress(Exception):
                failed.close()


def _scalars(kind: Kind, row: Row) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if name != "iteration" and isinstance(value, int | float):
            yield f"{kind}/{name}", value
