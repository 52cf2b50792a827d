"""One pass backwards through the tokens of an episode: what each decision is credited with.

An episode is steps of tokens. Reward and discount belong to the step, so they enter between its last token and the
first of the next step; inside a step there is neither. A token is a decision where the policy chose it (`sampled`):
padding, replies after the end and tokens that a constraint forces are passed over as if they were not there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Real


class Steps(NamedTuple):
    """What the steps of episodes led to."""

    reward: Float[Array, "*episodes steps"]
    """Of each step; 0 after the end."""
    terminated: Bool[Array, "*episodes steps"]
    """The step ended the game by its rules."""
    truncated: Bool[Array, "*episodes steps"]
    """The step ended it by the time limit."""
    final_value: Float[Array, "*episodes"]
    """Value of the observation after the last step; read where the episode was truncated, or where its last step ends
    neither way."""


class Backup(NamedTuple):
    """What lies behind each decision; 0 where there is none."""

    target: Float[Array, "*episodes steps tokens"]
    """One-step target: the value of the next decision, or at a step's last token r + gamma times that value."""
    trace: Float[Array, "*episodes steps tokens"]
    """The lambda-weighted advantage of the decisions behind: the advantage of this one is target - value + trace."""


def backup(
    values: Float[Array, "*episodes steps tokens"],
    sampled: Bool[Array, "*episodes steps tokens"],
    steps: Steps,
    discount: Real[ArrayLike, ""],
    *,
    trace_decay: Real[ArrayLike, ""] = 0.0,
    token_discount: Real[ArrayLike, ""] = 1.0,
) -> Backup:
    r"""One-step targets of all decisions, and the traces of generalised advantage estimation.

    With $V_j$ the value before the j-th of a step's n decisions and $V'$ the value before the first of the next step,

    $$y_j = \gamma_w V_{j+1} \;(j < n), \qquad y_n = r_t + \gamma V' \cdot [\text{not terminated}], \qquad
      A_j = y_j - V_j + e_j$$

    $$e_j = \gamma_w \lambda A_{j+1} \;(j < n), \qquad
      e_n = \gamma \lambda A' \cdot [\text{neither terminated nor truncated}]$$

    with $\gamma_w$ = 1 but for one ablation. Where a step ends by the time limit, $V'$ is `final_value` and nothing is
    carried over; what follows an episode's last step is never looked at. A step without a decision hands on what is
    behind it, with its reward and discount.

    Args:
      values: value before each token, of anything where not `sampled`, not a number included.
      sampled: tokens that are decisions.
      steps: what the steps led to; `final_value` is $V'$ behind the last.
      discount: $\gamma$ of a step, in [0, 1].
      trace_decay: $\lambda$ of a decision, in [0, 1]; at 0 there are no traces.
      token_discount: $\gamma_w$ of a token inside a step, in [0, 1].

    Example:
      >>> import jax.numpy as jnp
      >>> values, no = jnp.array([[1.0, 2.0], [3.0, 9.0]]), jnp.array([False, False])
      >>> sampled = jnp.array([[True, True], [True, False]])
      >>> reward, end = jnp.array([0.5, 4.0]), jnp.array([False, True])
      >>> print(backup(values, sampled, Steps(reward, end, no, jnp.array(8.0)), 0.5).target)
      [[2. 2.]
       [4. 0.]]
      >>> print(backup(values, sampled, Steps(reward, no, end, jnp.array(8.0)), 0.5).target)
      [[2. 2.]
       [8. 0.]]
    """
    values = jnp.where(sampled, values.astype(jnp.promote_types(values.dtype, jnp.float32)), 0.0)
    step_axis, final_value = steps.reward.ndim - 1, steps.final_value.astype(values.dtype)

    def step(after: tuple[Array, Array], xs: tuple[Array, ...]) -> tuple[tuple[Array, Array], Backup]:
        # Value of what comes next, and lambda times the advantage of it (of the first decision there).
        value, carried = after
        values, sampled, reward, terminated, truncated = xs
        value = jnp.where(terminated, 0.0, jnp.where(truncated, final_value, value))
        carried = jnp.where(terminated | truncated, 0.0, carried)

        def token(behind: tuple[Array, ...], xs: tuple[Array, Array]) -> tuple[tuple[Array, ...], Backup]:
            target, trace, *_ = behind
            value, is_decision = xs
            carried = trace_decay * (target - value + trace)
            now = token_discount * value, token_discount * carried, value, carried
            behind = tuple(jnp.where(is_decision, x, y) for x, y in zip(now, behind, strict=True))
            return behind, Backup(jnp.where(is_decision, target, 0.0), jnp.where(is_decision, trace, 0.0))

        target, trace = reward + discount * value, jnp.asarray(discount * carried)
        (_, _, value, carried), found = jax.lax.scan(
            token, (target, trace, target, trace), (values, sampled), reverse=True
        )
        return (value, carried), found

    def steps_first(x: Array) -> Array:
        return jnp.moveaxis(x, step_axis, 0)

    def tokens_second(x: Array) -> Array:
        return jnp.moveaxis(steps_first(x), -1, 1)

    by_step = steps.reward, steps.terminated, steps.truncated
    xs = *map(tokens_second, (values, sampled)), *map(steps_first, by_step)
    _, found = jax.lax.scan(step, (final_value, jnp.zeros_like(final_value)), xs, reverse=True)
    return jax.tree.map(lambda x: jnp.moveaxis(jnp.moveaxis(x, 1, -1), 0, step_axis), found)
