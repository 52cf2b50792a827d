"""States of a game as integers that are equal exactly when the states are, but for the time."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from envs_jax.environment import EnvironmentState

_NOT_THE_STATE = {field.name for field in dataclasses.fields(EnvironmentState)}
"""The clock and the flags of the end, which all states carry."""


def state_words(state: EnvironmentState) -> Int32[Array, " words"]:
    """The bytes of ONE state, clock and flags left out, as int32 words: an encoding, so nothing can collide.

    Floats are equal where their bits are, with both zeros taken as one. Leading axes are for `jax.vmap`.

    Raises:
        TypeError: a field of the state does not hold numbers.
    """
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name not in _NOT_THE_STATE}
    pieces = [_bytes(leaf) for leaf in jax.tree.leaves(fields)]
    whole = jnp.concatenate([jnp.zeros(0, jnp.uint8), *pieces])
    padded = jnp.pad(whole, (0, -whole.size % 4))
    return jax.lax.bitcast_convert_type(padded.reshape(-1, 4), jnp.int32)


def _bytes(leaf: Array) -> Array:
    if jnp.issubdtype(leaf.dtype, jnp.bool_):
        leaf = leaf.astype(jnp.uint8)
    elif jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = jnp.where(leaf == 0, 0, leaf)
    elif not jnp.issubdtype(leaf.dtype, jnp.integer):
        raise TypeError(f"a state holds {leaf.dtype}, which has no canonical bytes; give it numbers or leave GiGPO")
    return jax.lax.bitcast_convert_type(leaf, jnp.uint8).reshape(-1)
