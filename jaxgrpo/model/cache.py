"""Keys and values kept between calls: the prompt's shared prefix, and each row's own slots."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.sharding import constrain, kv_copies

CACHE_AXES = ("rows", None, "kv_heads", None)
"""Logical axes of a layer's keys, or values, of rows."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """Keys and values of the static prompt, computed once and attended to by every row: no batch axis.

    On a mesh the tokens are divided among the devices that share rows, and filled up to a number they can divide; a key
    or value head is held once for each tensor shard that has queries for it (`sharding.kv_copies`).

    Attributes:
        keys: rotated keys, one array a stack of layers, `prefix` tokens, which may be none.
        values: values.
        length: number of prompt tokens, which is also the position of a row's first token; what lies beyond is filling.
    """

    keys: tuple[Float[Array, "_ prefix kv_heads head_dim"], ...]
    values: tuple[Float[Array, "_ prefix kv_heads head_dim"], ...]
    length: int = dataclasses.field(metadata={"static": True})

    def whole(self) -> "Prefix":
        """The prefix with all tokens on every device, as decoding reads it again and again."""
        return jax.tree.map(lambda x: constrain(x, None, None, "kv_heads", None), self)

    def by_layer(self) -> list[tuple[Array, Array]]:
        """Keys and values of each layer, `[prefix, kv_heads, head_dim]`, from the lowest up."""
        return [
            (keys[index], values[index])
            for keys, values in zip(self.keys, self.values, strict=True)
            for index in range(keys.shape[0])
        ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeCache:
    """Each row's own keys and values, one array a layer so that a loop updates every one of them in place.

    Where decoding goes through the layers in a loop (`Transformer.decode_params`), one array a stack of layers instead,
    with the layers in front. All rows write the same slot at the same time; what differs between rows is which slots
    are `valid`.

    Attributes:
        keys: rotated keys.
        values: values.
        valid: slots that hold a token of the row.
        cursor: next slot to write, in [0, slots].
    """

    keys: tuple[Float[Array, "... batch slots kv_heads head_dim"], ...]
    values: tuple[Float[Array, "... batch slots kv_heads head_dim"], ...]
    valid: Bool[Array, "batch slots"]
    cursor: Int[Array, ""]

    @property
    def slots(self) -> int:
        """How many tokens a row can hold."""
        return self.valid.shape[1]

    def take(self, index: Int[Array, " some"]) -> "DecodeCache":
        """A cache of some of the rows, by number."""
        keys, values = jax.tree.map(lambda x: _divided(jnp.take(x, index, axis=x.ndim - 4)), (self.keys, self.values))
        return DecodeCache(keys, values, self.valid[index], self.cursor)


def _divided(x: Float[Array, "*layers batch slots kv_heads head_dim"]) -> Float[Array, "..."]:
    return constrain(x, *[None] * (x.ndim - len(CACHE_AXES)), *CACHE_AXES)


def empty_cache(config: ModelConfig, batch: int, slots: int, stacks: Sequence[int] = ()) -> DecodeCache:
    """A cache of `slots` empty slots for each of `batch` rows.

    Args:
        config: of the model.
        batch: rows.
        slots: of each row.
        stacks: layers in each of the model's stacks, where decoding goes through them in loops; none where it does not.
    """
    shape = (batch, slots, config.kv_heads * kv_copies(config), config.head_dim)
    shapes = [(layers, *shape) for layers in stacks] or [shape] * config.layers
    zeros = tuple(_divided(jnp.zeros(shape, config.dtype)) for shape in shapes)
    return DecodeCache(zeros, zeros, jnp.zeros((batch, slots), bool), jnp.zeros((), jnp.int32))


def write_slots(
    buffer: Shaped[Array, "batch slots *rest"], block: Shaped[Array, "batch width *rest"], cursor: Int[Array, ""]
) -> Shaped[Array, "batch slots *rest"]:
    """`buffer` with `block` in slots `cursor` to `cursor + width - 1` of every row."""
    return jax.lax.dynamic_update_slice_in_dim(buffer, block, cursor, axis=1)
