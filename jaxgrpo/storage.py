"""Where files go: folders on this machine, or an object store (`gs://`) reached through `etils.epath`.

A store has no append, no rename and no sync: an object is written whole, and is there whole or not at all.
"""

import importlib.util
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from etils import epath

from jaxgrpo.config import ConfigError

AnyPath = Path | epath.Path
"""A file or folder on this machine, or an object or prefix in a store."""

ANSWER_SECONDS = 20.0
"""How long a store may take to answer before it counts as out of reach; its client would go on trying for minutes."""

UPLOAD_SECONDS = 60.0
"""How often a file of rows is written to a store between the moments when it has to be there."""

_BACKENDS = ("gcsfs", "tensorflow")
"""Packages of which `etils.epath` needs one for gs://."""

T = TypeVar("T")


def open_path(text: str, *, option: str) -> AnyPath:
    """The file or folder that an option names; a store is asked whether it can be reached.

    Args:
        text: a path on this machine, `~` included, or gs://BUCKET/FOLDER.
        option: name of the option, for the error.

    Raises:
        ConfigError: another scheme, no folder in a bucket, no package that reaches the store, or no answer from it.
    """
    scheme, separator, place = text.partition("://")
    if not separator:
        return Path(text).expanduser()
    if scheme != "gs":
        raise ConfigError(f"{option} {text}: {scheme}:// is not supported; give a folder on this machine or gs://...")
    bucket, _, inside = place.partition("/")
    if not bucket or not inside.strip("/"):
        raise ConfigError(f"{option} {text}: give a folder in a bucket, as in gs://BUCKET/FOLDER.")
    if not any(map(importlib.util.find_spec, _BACKENDS)):
        raise ConfigError(f"{option} {text}: gs:// needs the extra gcs; pip install 'jaxgrpo[gcs]'.")
    path = epath.Path(text)
    _ask(path.exists, f"{option} {text}: cannot be reached")
    return path


def is_stored(path: AnyPath) -> bool:
    """Whether a path is in an object store rather than on this machine."""
    return "://" in str(path)


def require_writable(folder: AnyPath, *, option: str) -> None:
    """See that objects can be written to a folder in a store, in both ways that a run writes them, and leave none.

    Raises:
        ConfigError: they cannot; the line has the store's reason.
    """
    _ask(lambda: _probe(folder), f"{option} {folder}: cannot be written")


def _probe(folder: AnyPath) -> None:
    """Records go through epath, the arrays of a checkpoint through tensorstore: their credentials may differ."""
    import tensorstore

    probe, text = folder / ".probe", b"jaxgrpo"
    probe.write_bytes(b"")
    tensorstore.KvStore.open(f"{folder}/").result().write(probe.name, text).result()
    if probe.read_bytes() != text:
        raise OSError("what was written is not what is read")
    probe.unlink()


def _ask(call: Callable[[], T], complaint: str) -> T:
    """What a call to a store returns; its failure, or none within `ANSWER_SECONDS`, is one line."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    # A thread of its own, which no one waits for at the end of the process.
    threading.Thread(target=work, name="store", daemon=True).start()
    try:
        return answer.result(ANSWER_SECONDS)
    except TimeoutError:
        reason = f"no answer within {ANSWER_SECONDS:g} s"
    except Exception as error:
        reason = reason_of(error)
    raise ConfigError(f"{complaint} ({reason}); check the bucket, the network and your credentials.")


def reason_of(error: BaseException) -> str:
    """What went wrong, in a few words: of an error of the system its text, of any other the beginning of its own."""
    if isinstance(error, OSError) and type(error).__module__ == "builtins" and error.errno:
        return os.strerror(error.errno)
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."


def write_whole(path: AnyPath, data: bytes) -> None:
    """Write a file so that at any moment either the old or the whole new one is there.

    Raises:
        ConfigError: a store does not take it.
        OSError: this machine does not.
    """
    if not is_stored(path):
        beside = path.with_name(f".{path.name}.new")
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        return
    try:
        path.write_bytes(data)
    except Exception as error:
        raise ConfigError(f"{path}: cannot be written ({reason_of(error)}); what was there before is whole.") from error


def open_lines(path: AnyPath, beginning: str) -> "_LocalLines | _StoredLines":
    """A text file that grows (`write`, `sync`, `close`), holding `beginning` in place of what was there."""
    return _StoredLines(path, beginning) if is_stored(path) else _LocalLines(Path(path), beginning)


class _LocalLines:
    """Appended to; what is written is with the operating system, and so safe from a kill, when `write` returns."""

    def __init__(self, path: Path, beginning: str) -> None:
        write_whole(path, beginning.encode())
        self._file = path.open("a")

    def write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class _StoredLines:
    """Kept in memory and written whole: at `sync`, at the end, and with the first row after `UPLOAD_SECONDS`."""

    def __init__(self, path: AnyPath, beginning: str) -> None:
        self._path, self._parts, self._is_stored = path, [beginning], False
        self.sync()

    def write(self, text: str) -> None:
        self._parts.append(text)
        self._is_stored = False
        if time.monotonic() - self._when >= UPLOAD_SECONDS:
            self.sync()

    def sync(self) -> None:
        if not self._is_stored:
            # Marked first: what fails ends the session, and is not tried for another minute when the file is closed.
            self._is_stored, self._when = True, time.monotonic()
            write_whole(self._path, "".join(self._parts).encode())

    def close(self) -> None:
        self.sync()
