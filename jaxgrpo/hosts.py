"""Several processes that make one run, each with devices of its own: how they join, agree, and end together.

All run the same program; the first one alone writes records. JAX ends a process whose peer is lost from within, with a
dump instead of a message and SIGABRT; so each process of a run is the child of a small one that knows nothing of JAX,
and turns that into one line and an exit code (`supervise`).
"""

import collections
import contextlib
import ctypes
import dataclasses
import importlib.util
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

from jaxgrpo.config import ConfigError
from jaxgrpo.stopping import Exit
from jaxgrpo.storage import AnyPath

Result = TypeVar("Result")


class PeerError(ConfigError):
    """Another process of the run failed where all have to come through; its own line says how."""


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """How the processes of a run on several hosts find each other; TPU slices and SLURM steps need none of these."""

    coordinator: str | None = None
    """Address HOST:PORT of the first process, for a run of several processes; give it to all of them."""
    processes: int | None = None
    """How many processes the run has."""
    process_id: int | None = None
    """Which of them this is, from 0."""
    heartbeat: int = 100
    """Seconds without a sign of life after which a process of the run counts as lost."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What the processes of a run have in common.

    Attributes:
        kind: how it was found: options, a SLURM step, or a TPU slice.
        heartbeat: see `LaunchOptions`.
        options: for `jax.distributed.initialize`, which finds out the rest.
        certain: whether there are other processes for sure; a host with TPUs may be the only one.
    """

    kind: str
    heartbeat: int
    options: Mapping[str, Any]
    certain: bool = True


def find_cluster(launch: LaunchOptions, environment: Mapping[str, str] = os.environ) -> Cluster | None:
    """The cluster that this process belongs to; None for a run of one process.

    Raises:
        ConfigError: options that do not go together.
    """
    if launch.heartbeat < 1:
        raise ConfigError(f"--heartbeat {launch.heartbeat}: must be at least 1.")
    given = (launch.coordinator, launch.processes, launch.process_id)
    if any(value is not None for value in given):
        if launch.coordinator is None or launch.processes is None or launch.process_id is None:
            raise ConfigError("--coordinator, --processes and --process-id: give all three, or none.")
        if not re.fullmatch(r"\S+:\d+", launch.coordinator):
            raise ConfigError(f"--coordinator {launch.coordinator}: must be HOST:PORT.")
        if not 0 <= launch.process_id < launch.processes:
            raise ConfigError(
                f"--process-id {launch.process_id}: must be from 0 to {launch.processes - 1}, for --processes "
                f"{launch.processes}."
            )
        names = ("coordinator_address", "num_processes", "process_id")
        return Cluster("options", launch.heartbeat, dict(zip(names, given, strict=True)))
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return Cluster("SLURM", launch.heartbeat, {})
    if "," in environment.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in environment:
        return Cluster("TPU", launch.heartbeat, {})
    if _has_tpus():
        # JAX finds out whether there are other hosts.
        return Cluster("TPU", launch.heartbeat, {}, certain=False)
    return None


def _has_tpus() -> bool:
    devices = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    return bool(devices) and importlib.util.find_spec("libtpu") is not None


def join(cluster: Cluster) -> None:
    """Makes this process one of the cluster's; before anything asks JAX for a device.

    Where it is not certain that there are others and none is found, it says so and leaves the process by itself.

    Raises:
        ConfigError: the others cannot be found.
    """
    die_with_parent()
    try:
        jax.distributed.initialize(**cluster.options, heartbeat_timeout_seconds=cluster.heartbeat)
    except (RuntimeError, ValueError) as error:
        # Nothing says where the first process would be, nor do the TPUs themselves know of other hosts.
        if isinstance(error, ValueError) and not cluster.certain and jax.process_count() == 1:
            print(f"{cluster.kind}: no other hosts were found; this one makes the run alone.", file=sys.stderr)
            return
        how = "--coordinator" if cluster.kind == "options" else cluster.kind
        raise ConfigError(
            f"{how}: the processes of the run do not find each other ({str(error).splitlines()[0]}); see that all are "
            "started, and that the first one's address can be reached from the others."
        ) from error


# -- Agreement ------------------------------------------------------------------------------------------------------


def is_first() -> bool:
    """Whether this process is the one that writes records."""
    return jax.process_index() == 0


def agree(value: int) -> int:
    """The largest of the values that the processes give; all of them have to ask."""
    if jax.process_count() == 1:
        return value
    from jax.experimental.multihost_utils import process_allgather

    return int(np.max(process_allgather(np.int32(value))))


def together(function: Callable[[], Result], *, first_only: bool = False) -> Result | None:
    """What a function returns, once it has returned in every process; where it raises in one, all raise.

    Args:
        function: called in every process, or with `first_only` in the first alone: None in the others.
        first_only: whether it is.

    Raises:
        PeerError: it raised elsewhere.
    """
    count, own, error, result = jax.process_count(), jax.process_index(), None, None
    try:
        result = function() if is_first() or not first_only else None
    except Exception as raised:
        if count == 1:
            raise
        error = raised
    failed = agree(0 if error is None else count - own)
    if error is not None:
        raise error
    if failed:
        raise PeerError(f"process {own}: process {count - failed} could not go on, and says why.")
    return result


def require_shared(folder: AnyPath) -> None:
    """Sees that all processes have the same folder before them.

    Raises:
        ConfigError: some have another.
    """
    if jax.process_count() == 1:
        return
    mark = folder / f".shared-{agree(secrets.randbelow(2**31 - 1) if is_first() else 0)}"
    together(lambda: mark.write_bytes(b""), first_only=True)

    def look() -> None:
        if not mark.exists():
            raise ConfigError(
                f"--out {folder}: process {jax.process_index()} does not see what the first one writes there; give a "
                "folder that all hosts share, or one in a store (gs://)."
            )

    try:
        together(look)
    finally:
        if is_first():
            mark.unlink(missing_ok=True)


# -- The parent -----------------------------------------------------------------------------------------------------

_CHILD = "JAXGRPO_SUPERVISED"
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_LOGGED = re.compile(r"[IW]\d{4} \d\d:\d\d:\d\d|.*\[Gloo\]|.* peer ranks")
_DUMP = re.compile(r"[EF]\d{4} \d\d:\d\d:\d\d|\*\*\* |terminate called|Fatal Python error|Extension modules:")
_OURS = re.compile(r"jaxgrpo: |Traceback ")
_KEPT_LINES = 2_000
_LOST = "another process of the run was lost, or does not answer"
_REMEDY = "go on with --resume once all are there again"


def is_supervised() -> bool:
    """Whether this process is a child of `supervise`."""
    return os.environ.get(_CHILD) == str(os.getppid())


def supervise(words: Sequence[str]) -> int:
    """Runs this program with the words in a child and returns its exit code; its death becomes a line.

    What JAX and the libraries below it log is held, and goes into a file if the child dies; signals are passed on. The
    child dies with its parent.

    Args:
        words: of the command line, the command first.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "jaxgrpo", *words],
        env={**os.environ, _CHILD: str(os.getpid())},
        stdout=None if sys.stdout.isatty() else subprocess.PIPE,  # a bar needs the terminal
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # a terminal's SIGINT comes through us, and once
    )
    held: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
    streams = ((child.stdout, sys.stdout), (child.stderr, sys.stderr))
    readers = [threading.Thread(target=_pass_on, args=(*pair, held), daemon=True) for pair in streams if pair[0]]
    for reader in readers:
        reader.start()
    with _signals_to(child):
        code = child.wait()
    for reader in readers:
        reader.join()
    if code >= 0:
        return code
    return _died(-code, held)


def _pass_on(lines: Iterable[str], out: Any, held: "collections.deque[str]") -> None:
    """Shows what is meant for people, and holds what is not."""
    dumping = False
    for line in lines:
        # A record of an error, and a dump, have further lines.
        dumping = bool(_DUMP.match(line)) or (dumping and not _OURS.match(line))
        if dumping or _LOGGED.match(line):
            held.append(line)
        else:
            out.write(line)
            out.flush()


@contextlib.contextmanager
def _signals_to(child: "subprocess.Popen[str]") -> Iterator[None]:
    before = {number: signal.signal(number, lambda got, _: child.send_signal(got)) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _died(number: int, held: Sequence[str]) -> int:
    name = signal.Signals(number).name
    with tempfile.NamedTemporaryFile("w", prefix="jaxgrpo-", suffix=".log", delete=False) as log:
        log.writelines(held)
    if number == signal.SIGABRT:
        what, code = _LOST, Exit.PEER_LOST
    else:
        what, code = f"this process of the run was ended by {name}", 128 + number
    print(f"jaxgrpo: {what}; {_REMEDY}. Log: {log.name}", file=sys.stderr)
    return code


def die_with_parent() -> None:
    """Has Linux kill this process when the one that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def have_joined() -> bool:
    """Whether this process is one of a cluster's."""
    return jax.distributed.is_initialized()


PEER_FAILURES = (jax.errors.JaxRuntimeError,)
"""What is raised where a computation with other processes fails."""

_OF_PEERS = re.compile(r"(?i)gloo|peer|connection|heartbeat|coordination|unavailable|deadline_exceeded|aborted")


def tells_of_peers(error: Exception) -> bool:
    """Whether an error of a computation, in a process of several, comes of others that do not answer."""
    return have_joined() and _OF_PEERS.search(str(error)) is not None


def lost_line(error: Exception) -> str:
    """What a user is told of such an error."""
    reason = str(error).strip().splitlines()[0][:200]
    return f"{_LOST} ({reason}); {_REMEDY}."


def leave(code: int) -> NoReturn:
    """Ends this process at once with an exit code: no waiting for peers that may not come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
