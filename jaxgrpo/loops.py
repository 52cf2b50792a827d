"""Loops whose length is data, in the one form that stays cheap when a whole step is vmapped.

Under `jax.vmap` a `while_loop` with a batched predicate turns every carried array into a `select` each iteration, the
caches and parameters included. Here a predicate is reduced over the batch by `any`, so the loop runs until no member
wants another turn, and the carry is left alone. The price is a contract: **a body that is run once more for a member
that has finished must leave that member as it is**, by masking its own rows.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Int

Carry = TypeVar("Carry")


@custom_vmap
def any_member(predicate: Bool[Array, ""]) -> Bool[Array, ""]:
    """The predicate itself; under `vmap`, whether it holds for any member, without a batch axis."""
    return predicate


@any_member.def_vmap
def _any_member_batched(axis_size: int, in_batched: list[bool], predicate: Array) -> tuple[Array, bool]:
    del axis_size
    # Through any_member once more, so that a second vmap reduces its own axis too.
    return any_member(jnp.any(predicate, axis=0) if in_batched[0] else predicate), False


def while_any(condition: Callable[[Carry], Bool[Array, ""]], body: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`lax.while_loop` that, vmapped, goes on while any member's condition holds (see the module's contract)."""
    return jax.lax.while_loop(lambda c: any_member(condition(c)), body, carry)


def for_count(count: Int[Array, ""], body: Callable[[Int[Array, ""], Carry], Carry], carry: Carry) -> Carry:
    """`body(i, carry)` for i = 0 .. count-1; vmapped, up to the largest member's count (see the module's contract)."""

    def step(state: tuple[Array, Carry]) -> tuple[Array, Carry]:
        i, inner = state
        return i + 1, body(i, inner)

    return while_any(lambda state: state[0] < count, step, (jnp.int32(0), carry))[1]
