"""Checkpoints of a train state: asynchronous, atomic, the newest few kept."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array

from jaxgrpo.config import ConfigError
from jaxgrpo.storage import AnyPath, is_stored, reason_of

State = TypeVar("State")


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(max(before, logging.ERROR))
    try:
        yield
    finally:
        logger.setLevel(before)


class Checkpoints:
    """The checkpoints in a folder, each named by the number of iterations behind it.

    A checkpoint is written beside its final name and renamed when whole (in a store: marked when whole), so a kill at
    any moment leaves the one before it untouched. Saving returns once the state has left the devices; the rest happens
    in a thread, whose failure is raised by the next `save` or by `wait`.
    """

    def __init__(self, folder: AnyPath, *, keep: int | None) -> None:
        """Open the folder, making it where it is missing, and clear what killed sessions left half-written.

        Args:
            folder: of all checkpoints of the run.
            keep: how many of the newest are kept; None opens the folder for reading and changes nothing in it.
        """
        if keep is None:
            options = ocp.CheckpointManagerOptions(read_only=True, create=False, save_interval_steps=0)
        else:
            options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        place = folder if is_stored(folder) else folder.absolute()
        with _without_warnings():  # that a folder opened for reading is only read
            self._manager = ocp.CheckpointManager(place, options=options, item_handlers=ocp.PyTreeCheckpointHandler())
        self._folder = folder

    @property
    def latest(self) -> int | None:
        """Iterations behind the newest whole checkpoint; None where there is none."""
        return self._manager.latest_step()

    def save(self, iteration: int, state: Any) -> None:
        """Start saving; the state may be donated or deleted as soon as this returns."""
        self._manager.save(iteration, args=ocp.args.PyTreeSave(_named(state)))

    def wait(self) -> None:
        """Return when everything started is whole on the disk."""
        self._manager.wait_until_finished()

    def restore(self, iteration: int, like: State) -> State:
        """The state at an iteration, laid out on the devices as `like` is.

        Raises:
            ConfigError: the checkpoint's arrays are not those of `like`: another model or optimiser made it; or it is
                damaged.
        """
        wanted = _named(like)
        stored = self._stored(iteration)
        self._check(iteration, stored, wanted, "resume with the options the run was started with")
        arrays = self._read(iteration, jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted))
        leaves, structure = jax.tree.flatten(like)
        restored = (_like(wanted[name], arrays[name]) for name in wanted)
        return structure.unflatten(_with_key(leaf, array) for leaf, array in zip(leaves, restored, strict=True))

    def restore_params(self, iteration: int, like: State) -> State:
        """The parameters alone (`params` of the state) at an iteration; no other array is read.

        Args:
            iteration: of the checkpoint.
            like: the parameters as shapes and types, and with a sharding where they are to lie; without, they are not
                bound to a device.

        Raises:
            ConfigError: the checkpoint's parameters are not those of `like`: another model's; or it is damaged.
        """
        prefix = "params."
        wanted = {prefix + name: array for name, array in _named(like).items()}
        stored = {name: array for name, array in self._stored(iteration).items() if name.startswith(prefix)}
        self._check(iteration, stored, wanted, "give the model that the run was made with")
        arrays = self._read(iteration, wanted)
        return jax.tree.structure(like).unflatten(
            arrays[name] if leaf.sharding else jnp.asarray(np.asarray(arrays[name])) for name, leaf in wanted.items()
        )

    def close(self) -> None:
        """Wait for what was started and let go of the folder."""
        self._manager.close()

    def abandon(self) -> None:
        """Close at the end of a session: what was to be saved was waited for, or its failure is being reported."""
        with contextlib.suppress(Exception):
            self._manager.close()

    def _stored(self, iteration: int) -> dict[str, Any]:
        """Shape and type of every array in a checkpoint, by name."""
        with self._damage_told(iteration):
            metadata = self._manager.item_metadata(iteration)
            if metadata is None:
                raise ValueError("the list of its arrays is missing")
            return dict(metadata.tree)

    def _read(self, iteration: int, wanted: dict[str, Any]) -> dict[str, Any]:
        """The arrays of the wanted names, shapes and types; no other is read."""
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        with self._damage_told(iteration):
            args = ocp.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True)
            return dict(self._manager.restore(iteration, args=args))

    @contextlib.contextmanager
    def _damage_told(self, iteration: int) -> Iterator[None]:
        """Any error becomes one line.

        When one array cannot be read, the reads of the others end later, in threads, and each would print a traceback
        because the event loop that Orbax ran them in is closed: those are dropped, from here on.
        """
        hook = sys.unraisablehook
        sys.unraisablehook = lambda told: None if "Event loop is closed" in str(told.exc_value) else hook(told)
        try:
            yield
            sys.unraisablehook = hook
        except Exception as error:
            raise ConfigError(
                f"{self._folder / str(iteration)}: the checkpoint cannot be read ({reason_of(error)}); "
                "put its files back, or remove it to use the one before."
            ) from error

    def _check(self, iteration: int, stored: dict[str, Any], wanted: dict[str, Any], remedy: str) -> None:
        """Compare names, shapes and types before any array is read, for an error that names the array."""
        for name in sorted({*wanted, *stored}):
            has, should = (_describe(arrays.get(name)) for arrays in (stored, wanted))
            if has != should:
                raise ConfigError(
                    f"{self._folder / str(iteration)}: the checkpoint of another model or optimiser: {name} is {has}, "
                    f"and should be {should}; {remedy}."
                )


def bytes_of(state: Any) -> int:
    """Bytes that a checkpoint of the state takes at most."""
    return sum(leaf.nbytes for leaf in _named(state).values())


def _named(state: Any) -> dict[str, Any]:
    """All arrays by their path, random keys as the integers they hold: storage knows neither our classes nor keys."""
    named = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        named[name] = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    return named


def _describe(array: Any) -> str:
    return "absent" if array is None else f"{np.dtype(array.dtype).name}{list(array.shape)}"


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _like(wanted: Array, array: Array) -> Array:
    """The array, bound to its device only if `wanted` is: else the resumed step would be another program to compile."""
    return array if wanted.committed else jnp.asarray(np.asarray(array))


def _with_key(like: Array, leaf: Array) -> Array:
    return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like)) if _is_key(like) else leaf
