"""A head in chunks of rows, for whoever goes through the vocabulary without holding all of its scores."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxgrpo.model.sharding import constrain, vocabulary_shards

_LARGEST_CHUNK = 4_096


def cut(rows: Shaped[Array, " vocab *rest"], fill: int = 0) -> Shaped[Array, "chunks chunk *rest"]:
    """Rows in chunks, filled up with `fill`; of a head that is divided among devices each has its part of every one."""
    shards, rest = vocabulary_shards(rows.shape[0]), rows.shape[1:]
    chunk = chunk_size(rows.shape[0] // shards, _LARGEST_CHUNK // shards)
    rows = rows.reshape(shards, -1, *rest)
    if short := -rows.shape[1] % chunk:
        rows = jnp.pad(rows, ((0, 0), (0, short), *[(0, 0)] * len(rest)), constant_values=fill)
    chunks = jnp.swapaxes(rows.reshape(shards, -1, chunk, *rest), 0, 1).reshape(-1, shards * chunk, *rest)
    return constrain(chunks, None, "vocab", *[None] * len(rest))


def joined(chunks: Shaped[Array, "chunks chunk *rest"], vocab: int) -> Shaped[Array, " vocab *rest"]:
    """The rows that were cut into chunks."""
    shards, rest = vocabulary_shards(vocab), chunks.shape[2:]
    rows = jnp.swapaxes(chunks.reshape(chunks.shape[0], shards, -1, *rest), 0, 1).reshape(shards, -1, *rest)
    return rows[:, : vocab // shards].reshape(vocab, *rest)


def chunk_size(vocab: int, largest: int = _LARGEST_CHUNK) -> int:
    """The largest divisor of the vocabulary that is at most `largest`, or that number where divisors are all small."""
    if vocab <= largest:
        return vocab
    divisors = (vocab // n for n in range(2, 16 * vocab // largest) if vocab % n == 0)
    return next((size for size in divisors if size <= largest), largest)
