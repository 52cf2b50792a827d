"""Log-probability and entropy of sampled tokens from hidden states, never holding `[tokens, vocabulary]` at once.

Two ways to the same numbers: over the whole vocabulary in chunks (each recomputed in the backward pass), or, where a
constraint leaves a handful of tokens, over those alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxgrpo.sampling import tempered

_LARGEST_CHUNK = 16_384


class TokenStatistics(NamedTuple):
    """What losses may know of each sampled token, under the tempered and constrained distribution, in float32."""

    log_prob: Float[Array, "*tokens"]
    """Log-probability of the token."""
    entropy: Float[Array, "*tokens"]
    """Entropy of the distribution the token was drawn from, in nats."""


def over_choices(
    logits: Float[Array, "*tokens choices"],
    choices: Int[Array, "*tokens choices"],
    token: Int[Array, "*tokens"],
    temperature: Float[Array, ""],
) -> TokenStatistics:
    """Statistics where only a few tokens were allowed.

    Args:
        logits: of the allowed tokens.
        choices: ids of the allowed tokens; -1 fills up, and is not allowed.
        token: the sampled token, one of `choices`. Positions where it is not give an undefined log-probability.
        temperature: of sampling.
    """
    allowed = choices >= 0
    # A row without any choice (a position that was not sampled) must stay finite, in the gradient too.
    scaled = jnp.where(allowed, tempered(logits, temperature), -1e30)
    log_probs = jax.nn.log_softmax(scaled, axis=-1)
    taken = (choices == token[..., None]) & allowed
    return TokenStatistics(
        log_prob=jnp.sum(jnp.where(taken, log_probs, 0.0), axis=-1),
        entropy=-jnp.sum(jnp.where(allowed, jnp.exp(log_probs) * log_probs, 0.0), axis=-1),
    )


def over_vocabulary(
    hidden: Float[Array, "tokens embed"],
    head: Float[Array, "vocab embed"],
    token_logit: Float[Array, " tokens"],
    temperature: Float[Array, ""],
    *,
    vocab_size: int,
    logits: Callable[[Float[Array, "tokens embed"], Float[Array, "chunk embed"]], Float[Array, "tokens chunk"]],
    allowed: Callable[[Int[Array, " chunk"]], Bool[Array, "tokens chunk"]] | None = None,
) -> TokenStatistics:
    """Statistics over the first `vocab_size` tokens of the head, a chunk of the vocabulary at a time.

    With z the tempered logits, log Z = m + log sum exp(z - m) for a running maximum m, the entropy is
    log Z - sum p z, and the log-probability z[token] - log Z. Memory is one chunk of logits, forward and backward.

    Args:
        hidden: final hidden states at the positions that predict the tokens.
        head: rows of the output projection; padding rows beyond `vocab_size` take no probability.
        token_logit: logit of each sampled token.
        temperature: of sampling.
        vocab_size: number of real tokens.
        logits: the model's product of hidden states with rows of the head.
        allowed: tells, for a chunk of token ids, which each position may take; None allows all.
    """
    vocab, embed = head.shape
    chunk = chunk_size(vocab)
    padded = jnp.pad(head, ((0, -vocab % chunk), (0, 0))) if vocab % chunk else head
    chunks = padded.reshape(-1, chunk, embed)

    @jax.checkpoint
    def scan_chunk(
        carry: tuple[Array, Array, Array], xs: tuple[Array, Array]
    ) -> tuple[tuple[Array, Array, Array], None]:
        maximum, total, weighted = carry
        first, rows = xs
        ids = first + jnp.arange(chunk, dtype=jnp.int32)
        mask = (ids < vocab_size)[None, :]
        if allowed is not None:
            mask = mask & allowed(ids)
        z = tempered(logits(hidden, rows), temperature)
        largest = jax.lax.stop_gradient(jnp.max(jnp.where(mask, z, -jnp.inf), axis=-1))
        new = jnp.maximum(maximum, largest)
        # Both maxima are minus infinity until the first allowed token: subtract a finite number then.
        shift = jnp.where(jnp.isfinite(new), new, 0.0)
        keep = jnp.exp(maximum - shift)
        masses = jnp.where(mask, jnp.exp(jnp.where(mask, z - shift[:, None], 0.0)), 0.0)
        return (new, total * keep + masses.sum(-1), weighted * keep + (masses * z).sum(-1)), None

    tokens = hidden.shape[0]
    start = (jnp.full(tokens, -jnp.inf), jnp.zeros(tokens), jnp.zeros(tokens))
    firsts = jnp.arange(chunks.shape[0], dtype=jnp.int32) * chunk
    (maximum, total, weighted), _ = jax.lax.scan(scan_chunk, start, (firsts, chunks))
    total = jnp.where(total > 0, total, 1.0)
    log_z = jnp.where(jnp.isfinite(maximum), maximum, 0.0) + jnp.log(total)
    return TokenStatistics(log_prob=tempered(token_logit, temperature) - log_z, entropy=log_z - weighted / total)


def chunk_size(vocab: int) -> int:
    """The largest divisor of the vocabulary that is at most 16,384, or that number where divisors are all small."""
    if vocab <= _LARGEST_CHUNK:
        return vocab
    divisors = (vocab // n for n in range(2, vocab // 1024) if vocab % n == 0)
    return next((size for size in divisors if size <= _LARGEST_CHUNK), _LARGEST_CHUNK)
