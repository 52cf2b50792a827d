"""Episodes as text: one row a step, with the prompt and the reply as the model saw and sampled them.

A step and not an episode is the unit, for it is what a model reads and writes: such rows are flat, load anywhere (with
`datasets.load_dataset("json", ...)` for one), and go to supervised or preference training as they are. Group, sample
and step number put episodes together again.
"""

import contextlib
import importlib.util
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Float

from envs_jax.games import TokenizedGame
from jaxgrpo.config import ConfigError
from jaxgrpo.episodes import CLOSED, CUT, ENDED, Episodes
from jaxgrpo.records import shortest

_STOPS = {CLOSED: "closed", ENDED: "ended", CUT: "cut"}

Row = Mapping[str, Any]


def transcript(
    game: TokenizedGame,
    episodes: Episodes,
    *,
    iteration: int | None = None,
    advantages: Float[Array, "groups samples steps"] | None = None,
) -> Iterator[dict[str, Any]]:
    """The played steps of some episodes, in the order of group, sample and step.

    Args:
        game: what was played, with its text.
        episodes: what was played, on a device or not.
        iteration: of training, where it is that.
        advantages: what the tokens of each step are credited with, where that is known.

    Yields:
        `game`, `iteration`, `group`, `sample`, `step` (from 0); `prompt`, `reply` (text, control tokens included);
        `reply_ids`, `log_probs` and `sampled` (of each token of the reply; 0 and False where the model had no choice);
        `action` (the word that was played), `readable`, `stop` ("closed", "ended" or "cut"), `reward` (penalty
        included), `return` (of the episode), `advantage`, `terminated`, `truncated`, `success` (of the episode).
    """
    played, returns, credit = jax.device_get((episodes, episodes.returns, advantages))
    prefix = game.tokenizer.decode(game.prefix_ids)
    for place in np.argwhere(played.alive):
        at, episode = tuple(place), tuple(place[:2])
        observation = played.observation[at][-played.observation_length[at] :]
        length = played.reply.length[at]
        ids = played.reply.ids[at][:length].tolist()
        yield {
            "game": game.game.name,
            "iteration": iteration,
            **{name: int(number) for name, number in zip(("group", "sample", "step"), place, strict=True)},
            "prompt": prefix + game.tokenizer.decode(observation),
            "reply": game.tokenizer.decode(ids),
            "reply_ids": ids,
            "log_probs": [shortest(x) for x in played.reply.log_prob[at][:length]],
            "sampled": played.reply.sampled[at][:length].tolist(),
            "action": game.game.actions[played.reply.action[at]],
            "readable": bool(played.reply.readable[at]),
            "stop": _STOPS[int(played.reply.stop[at])],
            "reward": shortest(played.reward[at]),
            "return": shortest(returns[episode]),
            "advantage": None if credit is None else shortest(credit[at]),
            "terminated": bool(played.terminated[at]),
            "truncated": bool(played.truncated[at]),
            "success": bool(played.success[episode]),
        }


class EpisodeLog:
    """A file of JSON lines that takes the steps of an iteration at a time; none of them stays in memory."""

    def __init__(self, path: Path) -> None:
        """Open the file for appending."""
        self._file = path.open("a", encoding="utf-8")

    def extend(self, rows: Iterable[Row]) -> None:
        """Append rows; they are with the operating system when this returns."""
        _write_lines(self._file, rows)
        self._file.flush()

    def sync(self) -> None:
        """Have all rows on the disk, safe from a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def cut(path: Path, *, after: int) -> None:
    """Take the rows of iterations past `after`, and a last line that is not whole, off the end of an episode log."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["iteration"] > after:
                break
            end += len(line)
    os.truncate(path, end)


@runtime_checkable
class Table(Protocol):
    """Takes rows."""

    def extend(self, rows: Iterable[Row]) -> None:
        """Append rows."""


@contextlib.contextmanager
def open_table(path: Path) -> Iterator[Table]:
    """A new file of episodes, there when the context ends well: Parquet where its name ends so, else JSON lines.

    Raises:
        ConfigError: the name ends in neither .jsonl nor .parquet, the package for Parquet is missing, or the file
            cannot be written.
    """
    kinds = {".jsonl": _JsonTable, ".parquet": _ParquetTable}
    if path.suffix not in kinds:
        raise ConfigError(f"--export {path}: the name must end in {' or '.join(kinds)}.")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            f"--export {path}: the package pyarrow is missing; install it with: pip install 'jaxgrpo[export]', "
            "or give a name that ends in .jsonl."
        )
    beside = path.with_name(f".{path.name}.new")
    try:
        with _users(path):
            table = kinds[path.suffix](beside)
        try:
            yield _Reporting(table, path)
        finally:
            with _users(path):
                table.close()
        with _users(path):
            beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def _users(path: Path) -> Iterator[None]:
    """Failures to write are the user's to mend."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--export {path}: cannot be written ({error.strerror or error}).") from error


class _Reporting:
    def __init__(self, table: Table, path: Path) -> None:
        self._table, self._path = table, path

    def extend(self, rows: Iterable[Row]) -> None:
        with _users(self._path):
            self._table.extend(rows)


class _JsonTable:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def extend(self, rows: Iterable[Row]) -> None:
        _write_lines(self._file, rows)

    def close(self) -> None:
        self._file.close()


class _ParquetTable:
    """Parquet, a row group for a few thousand rows at a time."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        whole, number, truth, text = pyarrow.int32(), pyarrow.float32(), pyarrow.bool_(), pyarrow.string()
        self._schema = pyarrow.schema(
            {
                "game": text,
                **dict.fromkeys(("iteration", "group", "sample", "step"), whole),
                **dict.fromkeys(("prompt", "reply"), text),
                "reply_ids": pyarrow.list_(whole),
                "log_probs": pyarrow.list_(number),
                "sampled": pyarrow.list_(truth),
                "action": text,
                "readable": truth,
                "stop": text,
                **dict.fromkeys(("reward", "return", "advantage"), number),
                **dict.fromkeys(("terminated", "truncated", "success"), truth),
            }
        )
        self._batch = pyarrow.RecordBatch.from_pylist
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema)

    def extend(self, rows: Iterable[Row]) -> None:
        rows = iter(rows)
        while part := list(itertools.islice(rows, 4096)):
            self._writer.write_batch(self._batch(part, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def _write_lines(file: Any, rows: Iterable[Row]) -> None:
    file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
