"""Log-probability and entropy in chunks of the vocabulary, against the plain computation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from jaxgrpo import token_statistics as statistics
from jaxgrpo.model import chunks
from tests.jaxgrpo.jaxprs import array_shapes, equations

TOKENS, WIDTH = 6, 8
T = jnp.float32(0.7)


def problem(vocab: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (TOKENS, WIDTH))
    head = jax.random.normal(keys[1], (vocab, WIDTH))
    return hidden, head, jax.random.randint(keys[2], (TOKENS,), 0, vocab - 5)


def others(vocab: int) -> dict[str, Any]:
    """A reference, and a critic of another width."""
    keys = jax.random.split(jax.random.key(1), 4)
    reference = statistics.Scores(jax.random.normal(keys[0], (TOKENS, 4)), jax.random.normal(keys[1], (vocab, 4)))
    critic = statistics.Scores(jax.random.normal(keys[2], (TOKENS, 3)), jax.random.normal(keys[3], (vocab, 3)))
    return {"reference": reference, "critic": critic}


def product(hidden: jax.Array, rows: jax.Array) -> jax.Array:
    return hidden @ rows.T


def chunked(hidden: jax.Array, head: jax.Array, token: jax.Array, real: int, allowed: Any = None, **more: Any) -> Any:
    taken = jnp.einsum("te,te->t", hidden, head[token])
    return statistics.over_vocabulary(
        hidden, head, taken, T, vocab_size=real, logits=product, allowed=allowed and Partial(allowed), **more
    )


def plain(
    hidden: jax.Array,
    head: jax.Array,
    token: jax.Array,
    real: int,
    allowed: Any = None,
    reference: statistics.Scores | None = None,
    critic: statistics.Scores | None = None,
    critic_is_relative: bool = False,
    unweighted: bool = False,
) -> statistics.TokenStatistics:
    """All scores at once, by definition."""
    ids = jnp.arange(head.shape[0])
    mask = jnp.broadcast_to((ids < real) & (True if allowed is None else allowed(ids)), (TOKENS, head.shape[0]))

    def log_softmax(logits: jax.Array) -> jax.Array:
        return jnp.where(mask, jax.nn.log_softmax(jnp.where(mask, logits / T, -jnp.inf)), 0.0)

    log_pi = log_softmax(hidden @ head.T)
    pi = jnp.where(mask, jnp.exp(log_pi), 0.0)
    found = statistics.TokenStatistics(log_pi[jnp.arange(TOKENS), token], -jnp.sum(pi * log_pi, -1))
    mean = functools.partial(jnp.mean, axis=-1, where=mask)
    if unweighted:
        found = found._replace(mean_log_prob=mean(log_pi))
    logits = jnp.zeros(()) if reference is None else reference.hidden @ reference.head.T
    if reference is not None:
        found = found._replace(kl=jnp.sum(pi * (log_pi - log_softmax(logits)), -1))
    if critic is not None:
        q = critic.hidden @ critic.head.T
        q = q - logits if critic_is_relative else q
        found = found._replace(expected_q=jnp.sum(pi * q, -1), mean_q=mean(q) if unweighted else None)
    return found


def weighted_sum(found: statistics.TokenStatistics) -> jax.Array:
    """A scalar in which each statistic of each token weighs differently."""
    weights = jax.random.normal(jax.random.key(2), (len(found), TOKENS))
    return sum((jnp.sum(x * w) for x, w in zip(found, weights, strict=True) if x is not None), jnp.float32(0))


@pytest.mark.parametrize(
    ("chunk", "masked", "asked"),
    [
        (16, False, "nothing"),
        (37, True, "nothing"),
        (37, False, "critic"),
        (16, True, "all"),
        (37, False, "all"),
        (1000, True, "all"),
    ],
)
def test_values_and_gradients_equal_the_plain_ones(
    monkeypatch: pytest.MonkeyPatch, chunk: int, masked: bool, asked: str
):
    monkeypatch.setattr(chunks, "_LARGEST_CHUNK", chunk)
    vocab, real = 96, 91
    hidden, head, token = problem(vocab)
    allowed = (lambda ids: ids[None] % 3 == token[:, None] % 3) if masked else None
    more = {
        "nothing": {},
        "critic": {"critic": others(vocab)["critic"]},
        "all": {**others(vocab), "critic_is_relative": True, "unweighted": True},
    }[asked]

    def total(compute: Any, hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, Any]:
        found = compute(hidden, head, token, real, allowed, **more)
        return weighted_sum(found), found

    (gradients, found), (dense_gradients, dense) = (
        jax.jit(jax.grad(functools.partial(total, compute), argnums=(0, 1), has_aux=True))(hidden, head)
        for compute in (chunked, plain)
    )
    assert [x is None for x in found] == [x is None for x in dense]
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(dense), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients, dense_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
    np.testing.assert_array_equal(gradients[1][real:], 0)


def test_only_the_policy_is_differentiated():
    hidden, head, token = problem(96)
    more = others(96)

    def total(reference: Any, critic: Any) -> jax.Array:
        return weighted_sum(chunked(hidden, head, token, 96, reference=reference, critic=critic))

    for gradient in jax.tree.leaves(jax.grad(total, argnums=(0, 1))(more["reference"], more["critic"])):
        np.testing.assert_array_equal(gradient, 0)


def test_equal_policies_have_no_divergence_and_a_relative_critic_begins_at_zero(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunks, "_LARGEST_CHUNK", 16)
    hidden, head, token = problem(96)
    own = statistics.Scores(30 * hidden, head)
    found = chunked(30 * hidden, head, token, 96, reference=own, critic=own, critic_is_relative=True)
    np.testing.assert_array_equal(found.kl, 0)
    np.testing.assert_array_equal(found.expected_q, 0)


def test_members_of_a_vmap_have_their_own_masks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunks, "_LARGEST_CHUNK", 37)
    hidden, head, token = problem(96)
    members = jnp.stack([hidden, -hidden]), jnp.stack([token, token[::-1]])

    def gradient(hidden: jax.Array, token: jax.Array, compute: Any = chunked) -> jax.Array:
        def allowed(token: jax.Array, ids: jax.Array) -> jax.Array:
            return ids[None] % 3 == token[:, None] % 3

        return jax.grad(lambda h: weighted_sum(compute(h, head, token, 91, Partial(allowed, token), **others(96))))(
            hidden
        )

    ours = jax.jit(jax.vmap(gradient))(*members)
    theirs = [gradient(*member, compute=plain) for member in zip(*members, strict=True)]
    np.testing.assert_allclose(ours, np.stack(theirs), rtol=1e-5, atol=1e-5)


def test_no_array_of_tokens_by_vocabulary_forward_or_backward():
    """At the vocabulary of Qwen, in the program as written and in the memory it is compiled to."""
    vocab, tokens = 151_936, 48
    shape: Any = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    scores = statistics.Scores(shape((tokens, 2)), shape((vocab, 2)))

    def loss(policy: Any, hidden: jax.Array, taken: jax.Array, reference: Any, critic: Any) -> jax.Array:
        found: Any = statistics.over_vocabulary(
            hidden,
            policy,
            taken,
            T,
            vocab_size=vocab - 5,
            logits=product,
            reference=reference,
            critic=critic,
            critic_is_relative=True,
        )
        return jnp.sum(found.log_prob + found.entropy + found.kl - found.expected_q)

    arguments = scores.head, scores.hidden, shape((tokens,)), scores, scores
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    shapes = array_shapes(jax.make_jaxpr(gradient)(*arguments))
    assert (tokens, 2_374) in shapes
    assert max(np.prod(shape) for shape in shapes) < tokens * vocab / 4
    memory: Any = gradient.lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * tokens * vocab
    # Three products forward, and in the backward pass three again and the gradient of the hidden states. A head that is
    # frozen costs neither the array of its gradient nor the product.
    frozen = jax.make_jaxpr(jax.grad(loss, argnums=1))(*arguments)
    assert (vocab, 2) in shapes and (vocab, 2) not in array_shapes(frozen)
    assert sum(equation.primitive.name == "dot_general" for equation in equations(frozen)) == 7


@pytest.mark.parametrize(("vocab", "size"), [(512, 512), (49_152, 4_096), (151_936, 2_374), (32_003, 4_096)])
def test_chunks_divide_the_published_vocabularies(vocab: int, size: int):
    assert chunks.chunk_size(vocab) == size


def test_few_choices_equal_the_masked_vocabulary():
    hidden, head, _ = problem(96)
    ids = jnp.maximum(choices := jnp.array([[3, 50, 7, -1]] * TOKENS), 0)
    token = jnp.array([3, 50, 7, 3, 50, 7])
    reference, critic = (jnp.einsum("te,tae->ta", x.hidden, x.head[ids]) for x in others(96).values())

    def few(hidden: jax.Array) -> Any:
        logits = jnp.einsum("te,tae->ta", hidden, head[ids])
        return statistics.over_choices(logits, choices, token, T, reference_logits=reference, q=critic, unweighted=True)

    def full(hidden: jax.Array) -> Any:
        allowed = functools.partial(jnp.isin, test_elements=jnp.array([3, 50, 7]))
        return plain(hidden, head, token, 96, allowed, unweighted=True, **others(96))

    found = few(hidden)
    for name, theirs in full(hidden)._asdict().items():
        if theirs is not None:
            np.testing.assert_allclose(getattr(found, name), theirs, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(found.q, critic[jnp.arange(TOKENS), jnp.array([0, 1, 2] * 2)])
    ours, theirs = (jax.grad(lambda h, f=f: weighted_sum(f(h)))(hidden) for f in (few, full))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_position_without_choices_stays_finite_in_value_and_gradient():
    choices = jnp.full((2, 3), -1)

    def total(logits: jax.Array) -> jax.Array:
        found = statistics.over_choices(logits, choices, jnp.zeros(2, jnp.int32), T)
        return found.log_prob.sum() + found.entropy.sum()

    value, gradient = jax.value_and_grad(total)(jnp.ones((2, 3)))
    assert bool(jnp.isfinite(value)) and bool(jnp.isfinite(gradient).all())
