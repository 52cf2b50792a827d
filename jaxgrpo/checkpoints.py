"""Checkpoints of a train state: asynchronous, atomic, the newest few kept."""

import contextlib
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array

from jaxgrpo.config import ConfigError

State = TypeVar("State")


class Checkpoints:
    """The checkpoints in a folder, each named by the number of iterations behind it.

    A checkpoint is written beside its final name and renamed when whole, so a kill at any moment leaves the one before
    it untouched. Saving returns once the state has left the devices; the rest happens in a thread, whose failure is
    raised by the next `save` or by `wait`.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        """Open the folder, making it where it is missing, and clear what killed sessions left half-written."""
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        handler = ocp.StandardCheckpointHandler()
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handler)
        self._folder = folder

    @property
    def latest(self) -> int | None:
        """Iterations behind the newest whole checkpoint; None where there is none."""
        return self._manager.latest_step()

    def save(self, iteration: int, state: Any) -> None:
        """Start saving; the state may be donated or deleted as soon as this returns."""
        self._manager.save(iteration, args=ocp.args.StandardSave(_named(state)))

    def wait(self) -> None:
        """Return when everything started is whole on the disk."""
        self._manager.wait_until_finished()

    def restore(self, iteration: int, like: State) -> State:
        """The state at an iteration, laid out on the devices as `like` is.

        Raises:
            ConfigError: the checkpoint's arrays are not those of `like`: another model or optimiser made it.
        """
        wanted = _named(like)
        self._check(iteration, wanted)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
        arrays = self._manager.restore(iteration, args=ocp.args.StandardRestore(abstract))
        leaves, structure = jax.tree.flatten(like)
        restored = (_like(wanted[name], arrays[name]) for name in wanted)
        return structure.unflatten(_with_key(leaf, array) for leaf, array in zip(leaves, restored, strict=True))

    def close(self) -> None:
        """Wait for what was started and let go of the folder."""
        self._manager.close()

    def abandon(self) -> None:
        """Close at the end of a session: what was to be saved was waited for, or its failure is being reported."""
        with contextlib.suppress(Exception):
            self._manager.close()

    def _check(self, iteration: int, wanted: dict[str, Array]) -> None:
        """Compare names, shapes and types before any array is read, for an error that names the array."""
        stored = self._manager.item_metadata(iteration).tree
        for name in sorted({*wanted, *stored}):
            has, should = (_describe(arrays.get(name)) for arrays in (stored, wanted))
            if has != should:
                raise ConfigError(
                    f"{self._folder / str(iteration)}: the checkpoint of another model or optimiser: {name} is {has}, "
                    f"and should be {should}; resume with the options the run was started with."
                )


def bytes_of(state: Any) -> int:
    """Bytes that a checkpoint of the state takes at most."""
    return sum(leaf.nbytes for leaf in _named(state).values())


def _named(state: Any) -> dict[str, Array]:
    """All arrays by their path, random keys as the integers they hold: storage knows neither our classes nor keys."""
    named = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        named[name] = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    return named


def _describe(array: Any) -> str:
    return "absent" if array is None else f"{np.dtype(array.dtype).name}{list(array.shape)}"


def _is_key(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _like(wanted: Array, array: Array) -> Array:
    """The array, bound to its device only if `wanted` is: else the resumed step would be another program to compile."""
    return array if wanted.committed else jnp.asarray(np.asarray(array))


def _with_key(like: Array, leaf: Array) -> Array:
    return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like)) if _is_key(like) else leaf
