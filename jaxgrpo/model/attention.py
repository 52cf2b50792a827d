"""Attention of many short rows to one shared prefix and to themselves, with a single softmax over both.

The prompt itself, which is one long row, is the one place where cuDNN's fused attention applies. Rows have keys of two
kinds, with and without a batch axis. To attend to each kind apart and merge the two by their log-sum-exps, which
`jax.nn.dot_product_attention` can return, would lose gradients (it returns them as constants) and digits (in bfloat16).
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxgrpo.model.config import RopeScaling

# Finite, so that a padding query, which may attend to nothing, yields a finite number that nobody reads.
MASKED = -1e30


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Rotary angle per position of each pair of one head: theta^(-2 i / head_dim), scaled where a model says so.

    Llama 3.1's scaling (`rope_type: llama3`) divides by `factor` the frequencies that turn fewer than `low_freq_factor`
    times within the original context, keeps those that turn more than `high_freq_factor` times, and between the two
    interpolates linearly in the number of turns.

    Returns:
        float32 of shape [head_dim / 2]; made in float64, for an error here grows with the position.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is not None:
        turns = scaling.original_positions * frequencies / (2 * np.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / scaling.factor
    return frequencies.astype(np.float32)


def rope_angles(
    positions: Int[Array, "*rows"], frequencies: np.ndarray
) -> tuple[Float[Array, "*rows half"], Float[Array, "*rows half"]]:
    """Cosines and sines of the rotary angles position * frequency, float32 (arXiv 2104.09864)."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "*rows heads head_dim"], cos: Float[Array, "*rows half"], sin: Float[Array, "*rows half"]
) -> Float[Array, "*rows heads head_dim"]:
    """Rotates each pair (i, i + head_dim / 2), the pairing of Hugging Face's checkpoints."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attend(
    queries: Float[Array, "batch tokens heads head_dim"],
    keys: Float[Array, "batch slots kv_heads head_dim"],
    values: Float[Array, "batch slots kv_heads head_dim"],
    mask: Bool[Array, "batch tokens slots"],
    prefix_keys: Float[Array, "prefix kv_heads head_dim"],
    prefix_values: Float[Array, "prefix kv_heads head_dim"],
    prefix_length: int,
    precision: jax.lax.Precision,
) -> Float[Array, "batch tokens heads head_dim"]:
    """Softmax attention of every query to `prefix_length` tokens of the prefix and to the slots its mask admits.

    The prefix has no batch axis: its products are two large matrix products for all rows together.
    Scores and softmax are float32; the result has the type of `queries`.
    """
    batch, tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    grouped = queries.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim) * head_dim**-0.5
    float32 = {"precision": precision, "preferred_element_type": jnp.float32}
    own = jnp.einsum("btkgd,bskd->btkgs", grouped, keys, **float32)
    own = jnp.where(mask[:, :, None, None, :], own, MASKED)
    shared = jnp.einsum("btkgd,pkd->btkgp", grouped, prefix_keys, **float32)
    if prefix_length < prefix_keys.shape[0]:
        shared = jnp.where(jnp.arange(prefix_keys.shape[0]) < prefix_length, shared, MASKED)
    weights = jax.nn.softmax(jnp.concatenate([shared, own], axis=-1), axis=-1).astype(queries.dtype)
    shared, own = jnp.split(weights, [prefix_keys.shape[0]], axis=-1)
    mixed = jnp.einsum("btkgs,bskd->btkgd", own, values, **float32)
    mixed = mixed + jnp.einsum("btkgp,pkd->btkgd", shared, prefix_values, **float32)
    return mixed.astype(queries.dtype).reshape(queries.shape)


def attend_causally(
    queries: Float[Array, "tokens heads head_dim"],
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads head_dim"],
    precision: jax.lax.Precision,
) -> Float[Array, "tokens heads head_dim"]:
    """Softmax attention of every token of one sequence to itself and to those before it.

    On a machine with a single CUDA GPU it is cuDNN's, where the type is bfloat16 and the head's size one of cuDNN's.
    """

    def plain(queries: Array, keys: Array, values: Array) -> Array:
        mask = jnp.tril(jnp.ones((queries.shape[0], queries.shape[0]), bool))[None]
        nothing = keys[:0], values[:0]
        return attend(queries[None], keys[None], values[None], mask, *nothing, 0, precision)[0]

    if not _cudnn_applies(queries):
        return plain(queries, keys, values)
    # A program may be lowered for another platform than this machine's.
    return jax.lax.platform_dependent(queries, keys, values, cuda=fused, default=plain)


def fused(
    queries: Float[Array, "tokens heads head_dim"],
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads head_dim"],
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "tokens heads head_dim"]:
    """`attend_causally` by one fused kernel, which never holds tokens by tokens scores."""
    tokens = queries.shape[0]
    # JAX refuses odd lengths where there is a gradient; no token looks at the filling, which stands behind them all.
    padded = [jnp.pad(x, ((0, tokens % 2), (0, 0), (0, 0))) for x in (queries, keys, values)]
    return jax.nn.dot_product_attention(*padded, is_causal=True, implementation=implementation)[:tokens]


def _cudnn_applies(queries: Float[Array, "tokens heads head_dim"]) -> bool:
    """Whether this machine has one CUDA GPU whose cuDNN takes arrays like these.

    Among several devices arrays may be cut in ways that it refuses.
    """
    head_dim = queries.shape[-1]
    fits = queries.dtype in (jnp.bfloat16, jnp.float16) and head_dim <= 128 and head_dim % 8 == 0
    return bool(fits and queries.shape[0] > 0 and jax.device_count() == 1 and _is_ampere_or_later(jax.devices()[0]))


@functools.cache
def _is_ampere_or_later(device: Any) -> bool:
    if device.platform != "gpu" or "cuda" not in device.client.platform_version:
        return False
    return float(device.compute_capability) >= 8.0
