"""GiGPO: group-in-group policy optimisation (Feng et al. 2025, arXiv 2505.10978).

    A_{i,t} = A_i + w A^S_{i,t}

A_i is the episode's advantage over its group, as in MS-GRPO. A^S_{i,t} compares the discounted reward to go

    G_{i,t} = sum_{k >= t} gamma^{k-t} r_{i,k}

with that of all steps of the group, of any episode and at any time, that were played in the same state of the game:
what the action changed, with no need of a value network. In a state that was stood in once, A^S = 0.
"""

import dataclasses

import jax
from jaxtyping import Array, Float

from jaxgrpo.algorithms.advantages import rewards_to_go, state_advantages
from jaxgrpo.algorithms.ms_grpo import MSGRPO
from jaxgrpo.config import HyperParameters
from jaxgrpo.episodes import Episodes


@dataclasses.dataclass(frozen=True)
class GiGPO(MSGRPO):
    """MS-GRPO with a second advantage, among the steps that share a state; both are normalised alike."""

    @property
    def uses_anchor(self) -> bool:
        """Always: states are what steps are compared in."""
        return True

    def advantages(self, episodes: Episodes, hp: HyperParameters) -> Float[Array, "groups samples steps"]:
        """Advantage of the episode plus `hp.step_weight` times that of the step.

        Raises:
            ValueError: the episodes were played without recording the game's states.
        """
        if episodes.anchor is None:
            raise ValueError("GiGPO compares states, and these episodes have none; play them with record_anchor=True")
        groups, samples, steps, words = episodes.anchor.shape
        to_go = rewards_to_go(episodes.reward, hp.step_discount)

        def of_group(to_go: Array, anchor: Array, alive: Array) -> Array:
            flat = to_go.reshape(-1), anchor.reshape(-1, words), alive.reshape(-1)
            return state_advantages(*flat, normalise=self.normalise).reshape(samples, steps)

        of_steps = jax.vmap(of_group)(to_go, episodes.anchor, episodes.alive)
        return self._of_episodes(episodes)[..., None] + hp.step_weight * of_steps
