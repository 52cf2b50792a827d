"""What a run leaves behind: its folder, configuration, manifest, metrics, and digests of its state."""

import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from jaxgrpo import storage
from jaxgrpo.config import ConfigError, TrainConfig, differing_results, flatten, from_tables, with_options
from jaxgrpo.storage import AnyPath, write_whole

SCHEMA_VERSION = 1

TIMING_KEYS = ("seconds", "episodes_per_s", "tokens_per_s")
"""The keys of a metrics or evaluation row that depend on the machine, always its last ones.

Two runs with equal configurations and versions write rows that are identical apart from them. Tokens are those the
model read and wrote in play, the shared prefix not counted.
"""

METRIC_KEYS = (
    "iteration",
    "return_mean",
    "return_std",
    "success_rate",
    "episode_length",
    "unreadable_rate",
    "reply_tokens",
    "loss",
    "critic_loss",
    "kl",
    "entropy",
    "ratio_max",
    "clip_fraction",
    "grad_norm",
    "advantage_abs_mean",
)
"""Order of the keys of a metrics row; an algorithm's own follow, then `TIMING_KEYS`."""

_PACKAGES = (
    "jaxgrpo",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "transformers",
    "tokenizers",
    "outlines_core",
)
_FLAGS = re.compile(r"^(JAX_|XLA_|LIBTPU_)")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The folder of a run, on this machine or in a store, and the names of what it holds."""

    path: AnyPath

    @classmethod
    def of(cls, config: TrainConfig) -> "RunFolder":
        """The folder a configuration names, or runs/GAME-MODEL-seedS.

        Raises:
            ConfigError: the folder is in a store that cannot be reached, or of an unknown kind.
        """
        if config.run.out is None:
            model = re.sub(r"[^\w.-]+", "-", Path(config.model).stem).strip("-") or "model"
            return cls(Path("runs") / f"{config.game}-{model}-seed{config.seed}")
        return cls.at(config.run.out, option="--out")

    @classmethod
    def at(cls, text: str, *, option: str) -> "RunFolder":
        """The folder that an option names, see `storage.open_path`."""
        return cls(storage.open_path(text, option=option))

    @property
    def config(self) -> AnyPath:
        """Options of the run."""
        return self.path / "config.json"

    @property
    def manifest(self) -> AnyPath:
        """What the run was made with, and how its sessions ended."""
        return self.path / "manifest.json"

    @property
    def metrics(self) -> AnyPath:
        """One JSON object per iteration."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> AnyPath:
        """One JSON object per evaluation on held-out episodes."""
        return self.path / "evaluations.jsonl"

    @property
    def checkpoints(self) -> AnyPath:
        """One folder per checkpoint, named by the iterations it has behind it."""
        return self.path / "checkpoints"

    @property
    def curve(self) -> AnyPath:
        """Plot of the run."""
        return self.path / "curve.png"

    @property
    def tensorboard(self) -> AnyPath:
        """TensorBoard's event files, one per session."""
        return self.path / "tensorboard"

    @property
    def wandb(self) -> AnyPath:
        """What Weights & Biases keeps, and the id of its run."""
        return self.path / "wandb"

    @property
    def episodes(self) -> AnyPath:
        """One JSON object per step of exported episodes."""
        return self.path / "episodes.jsonl"

    @property
    def profile(self) -> AnyPath:
        """Trace of some iterations, and the seconds of their parts."""
        return self.path / "profile"

    @property
    def holds_run(self) -> bool:
        """Whether there is something here that a new run would write over."""
        ours = (self.config, self.manifest, self.metrics, self.evaluations, self.curve)
        # A session refused before it began leaves the folder of checkpoints empty.
        return any(path.exists() for path in ours) or (self.checkpoints.exists() and any(self.checkpoints.iterdir()))

    def read_config(self) -> TrainConfig:
        """The configuration of the run in this folder.

        Raises:
            ConfigError: there is no run here, or its configuration cannot be read.
        """
        try:
            stored = from_tables(json.loads(self.config.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{self.path}: holds no run (there is no config.json).") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.config}: cannot be read ({error}).") from None
        return with_options(TrainConfig(), stored, source=f"{self.config}: ")

    def claim(self, config: TrainConfig) -> None:
        """Make the folder and see that it is this run's and can be written, before any work is done.

        Raises:
            ConfigError: it holds a run and `resume` is off, holds none and `resume` is on, holds a run with other
                options, or cannot be written.
        """
        if not config.run.resume and self.holds_run:
            raise ConfigError(
                f"--out {self.path}: already holds a run; give --resume to go on with it, or another folder."
            )
        if config.run.resume:
            self._agree(config)
        if storage.is_stored(self.path):
            return storage.require_writable(self.path, option="--out")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            _probe(Path(self.path) / ".probe")
        except OSError as error:
            raise ConfigError(
                f"--out {self.path}: cannot be written ({_reason(error)}); give another folder."
            ) from None

    def _agree(self, config: TrainConfig) -> None:
        if not self.config.exists():
            raise ConfigError(f"--resume: there is no run in {self.path}; check --out, or leave out --resume.")
        stored = self.read_config()
        names = differing_results(stored, config)
        if names:
            was, now = flatten(stored), flatten(config)
            differences = ", ".join(f"--{n.replace('_', '-')} {was[n]} (not {now[n]})" for n in names)
            raise ConfigError(f"--resume: the run in {self.path} was made with {differences}; keep its options.")


def _probe(path: Path) -> None:
    """Write and sync one megabyte, then remove it: a full or read-only disk shows here and not after an hour."""
    try:
        with path.open("wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def disk_is_full(error: BaseException) -> bool:
    """Whether an error, or one it came from, says that no space is left (also as text, as storage libraries do)."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(seen) or "Disk quota exceeded" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def write_json(path: AnyPath, value: Mapping[str, Any]) -> None:
    """Write a JSON file so that at any moment either the old or the whole new one is there."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def write_config(path: AnyPath, config: TrainConfig) -> None:
    """Write the configuration, sections nested, as `RunFolder.read_config` reads it."""
    write_json(path, dataclasses.asdict(config))


class JsonLines:
    """A file of one JSON object per line, keyed by a rising "iteration"; what does not count as a number is null."""

    def __init__(self, path: AnyPath, *, keep: Callable[[int], bool] = lambda iteration: False) -> None:
        """Open the file for appending, keeping only the rows whose iteration `keep` accepts (by default none)."""
        self.rows = [row for row in read_rows(path) if keep(row["iteration"])]
        self._file = storage.open_lines(path, "".join(_line(row) for row in self.rows))

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row; when this returns it is safe from a kill, or in a store at the latest after `sync`."""
        self.rows.append(dict(row))
        self._file.write(_line(row))

    def sync(self) -> None:
        """Have all rows on the disk, safe from a power cut, or in the store."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class KeptRows:
    """Rows as a file of them holds them, and those to come, without the file: for processes that do not write it."""

    def __init__(self, path: AnyPath, keep: Callable[[int], bool]) -> None:
        """Read the rows whose iteration `keep` accepts."""
        self.rows = [row for row in read_rows(path) if keep(row["iteration"])]

    def append(self, row: Mapping[str, Any]) -> None:
        """Keep one row."""
        self.rows.append(dict(row))

    def sync(self) -> None:
        """Nothing: another process writes."""

    def close(self) -> None:
        """Nothing."""


def read_rows(path: AnyPath) -> list[dict[str, Any]]:
    """All whole rows of a file of JSON lines, none where there is no file; a last line cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().decode().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def _line(row: Mapping[str, Any]) -> str:
    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({name: plain(value) for name, value in row.items()}, allow_nan=False) + "\n"


def shortest(value: Any) -> float:
    """A float32 scalar as the float whose decimal form is shortest and still reads back to the same float32."""
    return float(str(np.float32(value)))


def ordered_row(values: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its keys in the order of the record: `METRIC_KEYS`, others by name, `TIMING_KEYS`."""
    others = sorted(values.keys() - {*METRIC_KEYS, *TIMING_KEYS})
    return {name: values[name] for name in (*METRIC_KEYS, *others, *TIMING_KEYS) if name in values}


def without_timings(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a row that equal runs share."""
    return {name: value for name, value in row.items() if name not in TIMING_KEYS}


@jax.jit
def digest(tree: PyTree) -> UInt32[Array, ""]:
    """One number that tells two pytrees of arrays apart: any changed bit, or two values swapped, changes it.

    Every element's bits are mixed with its position and the number of its leaf, and all are summed modulo 2**32. A sum
    of integers does not depend on its order, so neither does the digest on how the arrays lie on the devices.
    """
    total = jnp.uint32(0)
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        bits = _bits(leaf)
        place = _mix(_positions(bits.shape) + _mix(jnp.uint32(number + 1)))
        total += jnp.sum(_mix(bits ^ place), dtype=jnp.uint32)
    return total


def _bits(leaf: Array) -> Array:
    """The bit patterns of an array as uint32; elements of 8 bytes give two, on a last axis."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _positions(shape: tuple[int, ...]) -> Array:
    """Row-major position of every element modulo 2**32, made so that a sharded array's stays sharded."""
    position, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        position += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return position


def _mix(x: Array) -> Array:
    """The 32-bit finaliser of MurmurHash3: a bijection in which every input bit reaches every output bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def state_digests(state: Any) -> dict[str, Any]:
    """A train state's iteration, and the digest of every other part of it as eight hexadecimal digits."""
    parts = [field.name for field in dataclasses.fields(state) if field.name != "iteration"]
    return {"iteration": int(state.iteration)} | {name: f"{int(digest(getattr(state, name))):08x}" for name in parts}


def new_manifest(
    config: TrainConfig, state: Any, origin: Mapping[str, Any] | None = None, frozen: str | None = None
) -> dict[str, Any]:
    """The manifest of a run that starts from `state`: what made it, and what must agree to make it again.

    Args:
        config: the run.
        state: before the first iteration.
        origin: where its parameters come from, if from another run.
        frozen: digest of the parameters that are not trained, if there are any.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "seed": config.seed,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "init_from": origin,
        "digests": {"start": state_digests(state)} | ({"frozen": frozen} if frozen else {}),
        "machine": machine(),
        "sessions": [],
    }


def read_manifest(path: AnyPath) -> dict[str, Any]:
    """The manifest of a run.

    Raises:
        ConfigError: it is missing, cannot be read, or has another schema version.
    """
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); put the file back, or start in another folder.") from None
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: schema version {manifest.get('schema_version')}, and this jaxgrpo reads {SCHEMA_VERSION}; "
            "use the version of jaxgrpo that the run was started with."
        )
    return manifest


def require_base(run: RunFolder, found: str | None, *, option: str) -> None:
    """Sees that a run's frozen parameters are those it was trained on, by their digests.

    Args:
        run: with a manifest.
        found: `beginning.Beginning.frozen_digest` of its model now.
        option: that names the run.

    Raises:
        ConfigError: they are others: what was trained beside them means nothing.
    """
    expected = read_manifest(run.manifest)["digests"].get("frozen") if run.manifest.exists() else None
    if expected not in (None, found):
        raise ConfigError(
            f"{option} {run.path}: was trained on another base than --model has now (digest {expected}, not {found}); "
            "put the model's files back."
        )


def machine() -> dict[str, Any]:
    """Versions, devices, processor and flags that results may depend on."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "platform": f"{sys.platform}-{platform.machine()}",
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "processes": jax.process_count(),
        "cpu": _cpu(),
        "flags": {name: value for name, value in sorted(os.environ.items()) if _FLAGS.match(name)},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    """The processor and a digest of its feature flags: compiled code differs by them, and so may the last bits."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    fields = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", text.split("\n\n")[0], re.MULTILINE))
    features = " ".join(sorted((fields.get("flags") or fields.get("Features") or "").split()))
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "threads": os.cpu_count(),
        "features_sha256": hashlib.sha256(features.encode()).hexdigest()[:16],
    }
