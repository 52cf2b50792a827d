"""Playing held-out episodes: with a policy, and with players that need no model, on the same games."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from envs_jax.games import TextGame, TokenizedGame
from envs_jax.players import Player, players_of
from jaxgrpo.config import ConfigError, TrainConfig
from jaxgrpo.episodes import Episodes
from jaxgrpo.loops import while_any
from jaxgrpo.model.sharding import constrain_whole
from jaxgrpo.policy import LanguageAgentPolicy, Sampling
from jaxgrpo.records import RunFolder, require_base
from jaxgrpo.rollout import Keys, chance, play, start
from jaxgrpo.storage import AnyPath
from jaxgrpo.transcripts import Table, transcript

_HELD_OUT = 2
"""Folded into a seed's key: the stream that held-out episodes come from, which training never draws from."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of some episodes, one entry each."""

    returns: Float[np.ndarray, " episodes"]
    """Undiscounted returns, without penalties for unreadable replies."""
    success: Bool[np.ndarray, " episodes"]
    """Whether the game was won."""
    lengths: Int[np.ndarray, " episodes"]
    """Steps played."""
    unreadable: Float[np.ndarray, " episodes"]
    """Share of the steps whose reply could not be read."""
    played: Episodes | None = None
    """The episodes, one a group, where they were asked for."""


def play_policy(
    policy: LanguageAgentPolicy,
    game: TokenizedGame,
    params: Any,
    *,
    episodes: int,
    temperature: float,
    seed: int = 0,
    rows: int = 0,
    keep_episodes: bool = False,
) -> Outcome:
    """Plays held-out episodes, the same for the same seed whatever the policy.

    Args:
        policy: the player.
        game: the game, with its text.
        params: of the policy's model.
        episodes: how many, each from its own start state.
        temperature: of sampling; 0 is greedy.
        seed: which held-out episodes.
        rows: rows given to the model at once; 0 is all.
        keep_episodes: whether to return the episodes themselves as well.
    """
    sampling = Sampling(jnp.float32(temperature), jnp.float32(1.0))
    arrays, played = _play_policy(policy, game, params, held_out_key(seed), sampling, episodes, rows, keep_episodes)
    return _outcome(arrays, played)


def play_without_model(game: TextGame, player: Player, *, episodes: int, seed: int = 0) -> Outcome:
    """The same held-out episodes, with the same luck, played by one of `envs_jax.players`."""
    return _outcome(_play_without_model(game, player, held_out_key(seed), episodes))


def summarise(outcome: Outcome) -> dict[str, Any]:
    """Mean, standard deviation (ddof 1) and a 95% interval of the mean return, success rate and number of episodes.

    The interval is mean +- 1.96 standard errors: approximate below some 30 episodes.
    """
    returns = outcome.returns.astype(np.float64)
    episodes = len(returns)
    spread = float(returns.std(ddof=1)) if episodes > 1 else 0.0
    mean, half = float(returns.mean()), 1.96 * spread / episodes**0.5
    return {
        "return_mean": mean,
        "return_std": spread,
        "return_ci95": [mean - half, mean + half],
        "success_rate": float(outcome.success.mean()),
        "episode_length": float(outcome.lengths.mean()),
        "unreadable_rate": float(outcome.unreadable.mean()),
        "episodes": episodes,
    }


def evaluate_scenarios(
    subject: TrainConfig | AnyPath | str,
    scenarios: Sequence[str],
    *,
    episodes: int = 50,
    temperature: float = 0.5,
    seed: int = 0,
    mesh: str = "auto",
    export: Table | None = None,
) -> dict[str, Any]:
    """Plays named scenarios with a model and with the players that need none (`envs_jax.players.players_of`).

    Args:
        subject: the folder of a run (also gs://), whose last checkpoint plays with the run's wording and reply options;
            or a configuration, whose model plays as it is before training.
        scenarios: names of games; none is the subject's own game.
        episodes: of each scenario, the same for all players.
        temperature: of sampling; 0 is greedy.
        seed: which held-out episodes.
        mesh: devices that the model is divided among, see `sharding.make_mesh`.
        export: takes the model's steps as text, see `transcripts.transcript`.

    Returns:
        `{"scenarios": {name: {"model": summary, "random": summary, ...}}}`, see `summarise`; where optimal play is
        known, each summary has its `optimum_share` of the mean return.

    Raises:
        ConfigError: no such run, or nothing to evaluate in it.
        GameError: no such scenario.
    """
    # Only here: building needs evaluation, evaluating needs builds.
    from jaxgrpo.beginning import restore_params
    from jaxgrpo.build import build

    if episodes < 1:
        raise ConfigError(f"--episodes {episodes}: must be at least 1.")
    if not temperature >= 0:
        raise ConfigError(f"--temperature {temperature}: must be 0 or more.")
    config, params = (subject, None) if isinstance(subject, TrainConfig) else restore_params(subject, mesh)
    results, experiment = {}, None
    for name in scenarios or (config.game,):
        if experiment is not None:
            experiment = experiment.on(name)
        else:
            experiment = build(dataclasses.replace(config, game=name))
            if not isinstance(subject, TrainConfig):
                require_base(RunFolder.at(str(subject), option="--run"), experiment.frozen_digest(), option="--run")
        params = experiment.initial_params() if params is None else params
        game = experiment.game.game.scored
        outcome = experiment.evaluate(
            params, episodes=episodes, temperature=temperature, seed=seed, keep_episodes=export is not None
        )
        if export is not None and outcome.played is not None:
            export.extend(transcript(experiment.game.scored, outcome.played))
        outcomes = {"model": outcome}
        for player, plays in players_of(game.environment).items():
            outcomes[player] = play_without_model(game, plays, episodes=episodes, seed=seed)
        results[name] = _with_optimum({player: summarise(outcome) for player, outcome in outcomes.items()})
    return {"scenarios": results}


def _with_optimum(summaries: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Adds everyone's share of the optimal player's mean return, where there is one and it is above 0."""
    optimum = summaries.get("optimal", {}).get("return_mean", 0.0)
    if optimum <= 0:
        return summaries
    return {name: {**found, "optimum_share": found["return_mean"] / optimum} for name, found in summaries.items()}


def held_out_key(seed: int) -> PRNGKeyArray:
    """The key held-out episodes are folded from: a stream that training never draws from, whatever its seed."""
    return jax.random.fold_in(jax.random.key(seed), _HELD_OUT)


@functools.partial(jax.jit, static_argnames=("policy", "game", "episodes", "rows", "keep"))
def _play_policy(
    policy: LanguageAgentPolicy,
    game: TokenizedGame,
    params: Any,
    key: PRNGKeyArray,
    sampling: Sampling,
    episodes: int,
    rows: int,
    keep: bool,
) -> tuple[tuple[Array, Array, Array, Array], Episodes | None]:
    played = play(
        policy,
        game,
        params,
        policy.prefix(params),
        key,
        groups=episodes,
        samples=1,
        sampling=sampling,
        penalty=jnp.float32(0),
        rows=rows,
    )
    alive = played.alive[:, 0]
    lengths = alive.sum(-1)
    unreadable = jnp.sum(alive & ~played.reply.readable[:, 0], axis=-1) / lengths
    found = (played.returns[:, 0], played.success[:, 0], lengths, unreadable), played if keep else None
    return constrain_whole(found)


@functools.partial(jax.jit, static_argnames=("game", "player", "episodes"))
def _play_without_model(
    game: TextGame, player: Player, key: PRNGKeyArray, episodes: int
) -> tuple[Array, Array, Array, Array]:
    keys = Keys.make(key, episodes, 1)

    @jax.vmap
    def choose(key: PRNGKeyArray, state: Any) -> Int[Array, ""]:
        return player(game.environment, key, state, game.params)

    def advance(carry: Any) -> Any:
        step, state, returns, lengths = carry
        alive = ~(state.terminated | state.truncated)
        own = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys.samples[:, 0], step)
        state, reward, _, _ = chance(game, keys.groups, step, state, choose(own, state))
        return step + 1, state, returns + reward, lengths + alive

    def unfinished(carry: Any) -> Bool[Array, ""]:
        return jnp.any(~(carry[1].terminated | carry[1].truncated))

    nothing = jnp.zeros(episodes)
    _, state, returns, lengths = while_any(
        unfinished, advance, (jnp.int32(0), start(game, keys.groups), nothing, nothing.astype(jnp.int32))
    )
    return returns, jax.vmap(lambda s: game.won(s, game.params))(state), lengths, nothing


def _outcome(arrays: tuple[Array, Array, Array, Array], played: Episodes | None = None) -> Outcome:
    returns, success, lengths, unreadable = (np.asarray(x) for x in arrays)
    return Outcome(returns, success, lengths, unreadable, played)
