"""Drawing one token from logits: temperature, top-k, top-p and greedy, with one uniform number a token.

A token costs one random number, not one a vocabulary entry: the draw inverts the cumulative distribution in two levels
(blocks, then inside a block), in float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_BLOCK = 256


def tempered(logits: Float[Array, "... vocab"], temperature: Float[Array, ""]) -> Float[Array, "... vocab"]:
    """Logits divided by the temperature, in float32; at temperature 0 (greedy) they are left as they are."""
    return logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1.0)


def truncate(
    logits: Float[Array, "rows vocab"], *, top_k: int, top_p: Float[Array, ""] | None
) -> Float[Array, "rows vocab"]:
    """Logits with everything outside the top-k, then outside the nucleus of mass top-p, at minus infinity.

    Ties with the last token kept are kept. The likeliest token always stays.

    Args:
        logits: unnormalised log-probabilities; minus infinity where a token is not allowed.
        top_k: number of tokens kept; 0, or at least the vocabulary, keeps all.
        top_p: probability mass kept (Holtzman et al., arXiv 1904.09751), in (0, 1]; None keeps all.
    """
    if 0 < top_k < logits.shape[-1]:
        lowest = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits >= lowest, logits, -jnp.inf)
    if top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        kept = (before < top_p).at[:, 0].set(True)
        lowest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= lowest, logits, -jnp.inf)
    return logits


def categorical(uniform: Float[Array, " rows"], logits: Float[Array, "rows vocab"]) -> Int[Array, " rows"]:
    """Index drawn with probability softmax(logits), by inverting the cumulative distribution at `uniform`.

    A token at minus infinity is never drawn, whatever the rounding.

    Args:
        uniform: numbers in [0, 1).
        logits: unnormalised log-probabilities, at least one finite in each row.
    """
    masses = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    vocab = masses.shape[-1]
    if vocab <= 2 * _BLOCK:
        return _invert(masses, uniform)[0]
    blocks = jnp.pad(masses, ((0, 0), (0, -vocab % _BLOCK))).reshape(masses.shape[0], -1, _BLOCK)
    block, remainder = _invert(jnp.sum(blocks, axis=-1), uniform)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + _invert(inside, remainder)[0]


def _invert(
    masses: Float[Array, "rows n"], uniform: Float[Array, " rows"]
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """The index where the cumulative mass passes `uniform` of the total, and how far inside it, in [0, 1)."""
    cumulative = jnp.cumsum(masses, axis=-1)
    threshold = (uniform * cumulative[:, -1])[:, None]
    # Cumulative sums are rounded and need not rise where a mass is 0: ask for the mass as well.
    passed = (cumulative > threshold) & (masses > 0)
    found = jnp.any(passed, axis=-1)
    index = jnp.where(found, jnp.argmax(passed, axis=-1), jnp.argmax(masses, axis=-1)).astype(jnp.int32)
    mass = jnp.take_along_axis(masses, index[:, None], axis=-1)[:, 0]
    end = jnp.take_along_axis(cumulative, index[:, None], axis=-1)[:, 0]
    inside = jnp.clip((threshold[:, 0] - (end - mass)) / mass, 0.0, jnp.float32(1 - 2**-24))
    return index, inside


def draw(
    uniform: Float[Array, " rows"],
    logits: Float[Array, "rows vocab"],
    *,
    temperature: Float[Array, ""],
    top_k: int = 0,
    top_p: Float[Array, ""] | None = None,
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """A token for each row and its log-probability.

    The log-probability is that of the tempered distribution **before** truncation, so that a training pass that
    knows nothing of top-k and top-p finds a ratio of 1; the bias this leaves is that of sampling from the truncated
    distribution. At temperature 0 the likeliest token is taken.

    Args:
        uniform: one number in [0, 1) a row.
        logits: minus infinity where a token is not allowed.
        temperature: 0 or more.
        top_k: see `truncate`.
        top_p: see `truncate`.

    Returns:
        token ids and log-probabilities.
    """
    scaled = tempered(logits, temperature)
    drawn = categorical(uniform, truncate(scaled, top_k=top_k, top_p=top_p))
    token = jnp.where(temperature > 0, drawn, jnp.argmax(scaled, axis=-1)).astype(jnp.int32)
    taken = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0]
    return token, taken - jax.nn.logsumexp(scaled, axis=-1)
