"""Per-step GRPO: every step is credited with what followed it, not with the whole episode.

    G_{i,t} = sum_{k >= t} gamma^{k-t} r_{i,k}
    A_{i,t} = (G_{i,t} - mean_t G) / (std_t G + eps)

mean_t and std_t run over the episodes of the group that are still playing at step t. In their first step these share a
state; later they need not, and the baseline compares what cannot be compared. MS-GRPO argues against it, and it is here
to be compared with.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxgrpo.algorithms.advantages import group_advantages, rewards_to_go
from jaxgrpo.algorithms.ms_grpo import MSGRPO
from jaxgrpo.config import HyperParameters
from jaxgrpo.episodes import Episodes


@dataclasses.dataclass(frozen=True)
class StepGRPO(MSGRPO):
    """MS-GRPO with one advantage a step: the reward to go over that of the group at the same step."""

    def advantages(self, episodes: Episodes, hp: HyperParameters) -> Float[Array, "groups samples steps"]:
        """Advantage of each step among the samples of its group that play the step of the same number.

        A step that one sample plays alone gets 0.
        """
        groups, samples, steps = episodes.alive.shape

        def same_step(x: Array) -> Array:
            return jnp.swapaxes(x, 1, 2).reshape(groups * steps, samples)

        to_go = rewards_to_go(episodes.reward, hp.step_discount)
        advantage = group_advantages(same_step(to_go), same_step(episodes.alive), normalise=self.normalise)
        return jnp.swapaxes(advantage.reshape(groups, steps, samples), 1, 2)
