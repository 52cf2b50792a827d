"""Loops whose length is data: results, and what vmap makes of their predicates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.loops import any_member, for_count, while_any
from tests.jaxgrpo.jaxprs import selected_shapes


def count_up(count: jax.Array, cache: jax.Array) -> jax.Array:
    """Adds 1 to the first `count` entries; turns beyond a member's own count add nothing, as the contract asks."""
    return for_count(count, lambda i, c: c.at[i].add(jnp.where(i < count, 1.0, 0.0)), cache)


def plain_count_up(count: jax.Array, cache: jax.Array) -> jax.Array:
    def body(carry: Any) -> Any:
        i, c = carry
        return i + 1, c.at[i].add(1.0)

    return jax.lax.while_loop(lambda carry: carry[0] < count, body, (0, cache))[1]


def test_for_count_runs_count_times():
    np.testing.assert_array_equal(count_up(jnp.int32(3), jnp.zeros(5)), [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(count_up(jnp.int32(0), jnp.zeros(5)), np.zeros(5))


def test_vmapped_members_keep_their_own_counts():
    counts = jnp.array([0, 3, 5])
    np.testing.assert_array_equal(jax.vmap(count_up)(counts, jnp.zeros((3, 5))).sum(1), [0, 3, 5])


def test_nested_vmaps_reduce_every_axis():
    counts = jnp.array([[0, 3], [5, 1]])
    out = jax.vmap(jax.vmap(count_up))(counts, jnp.zeros((2, 2, 5)))
    np.testing.assert_array_equal(out.sum(-1), counts)


def test_predicate_under_vmap_has_no_batch_axis():
    batched = jax.vmap(any_member, out_axes=None)(jnp.array([False, True]))
    assert batched.shape == () and bool(batched)


def test_vmapped_loop_selects_nothing_as_large_as_its_carry():
    counts, caches = jnp.array([2, 3]), jnp.zeros((2, 10_000))

    def selected(function: Any) -> list[tuple[int, ...]]:
        return selected_shapes(jax.make_jaxpr(jax.vmap(function))(counts, caches))

    assert caches.shape not in selected(count_up)
    # What the helper is for: the plain loop, vmapped, selects the whole carry each turn.
    assert caches.shape in selected(plain_count_up)


@pytest.mark.parametrize("limit", [1, 4])
def test_while_any_is_a_while_loop(limit: int):
    assert int(while_any(lambda x: x < limit, lambda x: x + 1, jnp.int32(0))) == limit
