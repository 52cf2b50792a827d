"""Episodes of a game played by a language-agent policy, whole, inside one compiled function."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, PyTree

from envs_jax.games import TextGame, TokenizedGame
from jaxgrpo.anchors import state_words
from jaxgrpo.episodes import Episodes, Reply
from jaxgrpo.loops import for_count, while_any
from jaxgrpo.model.cache import Prefix
from jaxgrpo.model.sharding import whole_rows
from jaxgrpo.policy import LanguageAgentPolicy, Sampling


class Keys(NamedTuple):
    """Where an iteration's randomness comes from: independent of batch size, padding and neighbours.

    Every key is folded from the iteration's with the numbers of the group, the sample, the step and the token.
    """

    groups: Key[Array, " groups"]
    samples: Key[Array, "groups samples"]

    @classmethod
    def make(cls, key: PRNGKeyArray, groups: int, samples: int) -> "Keys":
        """One key a group, for start states and shared chance; one a sample, for its own."""
        fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        of_groups = fold(key, jnp.arange(groups))
        # Sample numbers start at 1: 0 is the group's own randomness.
        return cls(of_groups, jax.vmap(fold, in_axes=(0, None))(of_groups, 1 + jnp.arange(samples)))


_RESET, _CHANCE, _REPLY = 0, 1, 2


def start(game: TextGame, keys: Key[Array, " episodes"]) -> Any:
    """Start states of some games, each from its key."""
    return jax.vmap(lambda key: game.environment.reset(key, game.params)[1])(_purpose(keys, _RESET))


def chance(
    game: TextGame, keys: Key[Array, " episodes"], step: Int[Array, ""], state: Any, action: Int[Array, " episodes"]
) -> tuple[Any, Float[Array, " episodes"], Bool[Array, " episodes"], Bool[Array, " episodes"]]:
    """Plays an action in each of some games: states, rewards, and whether they terminated or were truncated.

    Games whose keys are equal have equal luck at the same step.
    """
    _, state, reward, terminated, truncated, _ = jax.vmap(
        lambda key, s, a: game.environment.step(key, s, a, game.params)
    )(_purpose(keys, _CHANCE, step), state, action)
    return state, reward, terminated, truncated


def _purpose(keys: Key[Array, "*shape"], purpose: int, step: Int[Array, ""] | int = 0) -> Key[Array, "*shape"]:
    def fold(key: PRNGKeyArray) -> PRNGKeyArray:
        return jax.random.fold_in(jax.random.fold_in(key, purpose), step)

    for _ in range(keys.ndim):
        fold = jax.vmap(fold)
    return fold(keys)


class _Play(NamedTuple):
    """Games in progress and what was recorded so far; the recording's leading axis is the step."""

    step: Int[Array, ""]
    state: Any
    alive: Bool[Array, " episodes"]
    observation: Int[Array, "steps_and_one episodes tokens"]
    observation_length: Int[Array, "steps_and_one episodes"]
    reply: Reply
    reward: Float[Array, "steps episodes"]
    terminated: Bool[Array, "steps episodes"]
    truncated: Bool[Array, "steps episodes"]
    was_alive: Bool[Array, "steps episodes"]
    anchor: Int[Array, "steps episodes words"] | None


def play(
    policy: LanguageAgentPolicy,
    game: TokenizedGame,
    params: PyTree[Array],
    prefix: Prefix,
    key: PRNGKeyArray,
    *,
    groups: int,
    samples: int,
    sampling: Sampling,
    penalty: Float[Array, ""],
    share_chance: bool = True,
    rows: int = 0,
    record_anchor: bool = False,
) -> Episodes:
    """Plays `groups` start states `samples` times each, until every game is over.

    An unreadable reply plays the first action and costs `penalty`; the episode goes on.

    Args:
        policy: the player.
        game: the game, with its text for the policy's tokenizer.
        params: of the policy's model.
        prefix: from `policy.prefix(params)`.
        key: of this iteration.
        groups: number of start states.
        samples: episodes of each.
        sampling: temperature and nucleus.
        penalty: taken off the reward where a reply could not be read.
        share_chance: whether the samples of a group also share the game's randomness at every step.
        rows: rows given to the model at once; 0 is all. When it is fewer, episodes that are over cost nothing.
        record_anchor: whether to record the game's state before each step.
    """
    limit = game.game.environment.max_steps
    episodes = groups * samples
    keys = Keys.make(key, groups, samples)

    def per_sample(x: Array) -> Array:
        return jnp.repeat(x, samples, axis=0)

    observe, words = jax.vmap(game.observation), jax.vmap(state_words)
    state = jax.tree.map(per_sample, start(game.game, keys.groups))
    own_keys = keys.samples.reshape(episodes)
    chance_keys = per_sample(keys.groups) if share_chance else own_keys
    begin = _begin(state, *observe(state), words(state) if record_anchor else None, limit, policy.reply_limit)

    def advance(now: _Play) -> _Play:
        t = now.step
        reply = _reply_in_parts(
            policy,
            params,
            prefix,
            now.observation[t],
            now.observation_length[t],
            _purpose(own_keys, _REPLY, t),
            sampling,
            now.alive,
            rows or episodes,
        )
        state, reward, terminated, truncated = chance(game.game, chance_keys, t, now.state, reply.action)
        reward = jnp.where(now.alive, reward - penalty * ~reply.readable, 0.0)
        ids, length = observe(state)
        return _Play(
            step=t + 1,
            state=state,
            alive=now.alive & ~terminated & ~truncated,
            observation=now.observation.at[t + 1].set(ids),
            observation_length=now.observation_length.at[t + 1].set(length),
            reply=jax.tree.map(lambda all_steps, one: all_steps.at[t].set(one), now.reply, reply),
            reward=now.reward.at[t].set(reward),
            terminated=now.terminated.at[t].set(now.alive & terminated),
            truncated=now.truncated.at[t].set(now.alive & truncated),
            was_alive=now.was_alive.at[t].set(now.alive),
            anchor=None if now.anchor is None else now.anchor.at[t].set(words(now.state)),
        )

    with jax.named_scope("steps"):
        end = while_any(lambda now: jnp.any(now.alive) & (now.step < limit), advance, begin)
    return _as_episodes(end, game.game, groups, samples)


def _begin(
    state: Any,
    observation: Int[Array, "episodes tokens"],
    observation_length: Int[Array, " episodes"],
    anchor: Int[Array, "episodes words"] | None,
    limit: int,
    reply_limit: int,
) -> _Play:
    """Games at their start, with room for `limit` steps."""

    def buffer(like: Array, steps: int = limit) -> Array:
        return jnp.zeros((steps, *like.shape), like.dtype)

    episodes = observation.shape[0]
    flags = jnp.zeros(episodes, bool)
    return _Play(
        step=jnp.int32(0),
        state=state,
        alive=~flags,
        observation=buffer(observation, limit + 1).at[0].set(observation),
        observation_length=buffer(observation_length, limit + 1).at[0].set(observation_length),
        reply=jax.tree.map(buffer, Reply.blank(episodes, reply_limit)),
        reward=buffer(jnp.zeros(episodes)),
        terminated=buffer(flags),
        truncated=buffer(flags),
        was_alive=buffer(flags),
        anchor=None if anchor is None else buffer(anchor),
    )


def _as_episodes(end: _Play, game: TextGame, groups: int, samples: int) -> Episodes:
    """What was recorded, with the step behind group and sample rather than in front."""

    def by_group(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(groups, samples, x.shape[0], *x.shape[2:])

    return Episodes(
        observation=by_group(end.observation),
        observation_length=by_group(end.observation_length),
        reply=jax.tree.map(by_group, end.reply),
        reward=by_group(end.reward),
        terminated=by_group(end.terminated),
        truncated=by_group(end.truncated),
        alive=by_group(end.was_alive),
        success=jax.vmap(lambda s: game.won(s, game.params))(end.state).reshape(groups, samples),
        anchor=None if end.anchor is None else by_group(end.anchor),
    )


def _reply_in_parts(
    policy: LanguageAgentPolicy,
    params: PyTree[Array],
    prefix: Prefix,
    observation: Int[Array, "episodes tokens"],
    observation_length: Int[Array, " episodes"],
    keys: Key[Array, " episodes"],
    sampling: Sampling,
    alive: Bool[Array, " episodes"],
    rows: int,
) -> Reply:
    """Replies of the episodes that are alive, `rows` at a time; the replies of the others are blank.

    Living episodes are brought to the front, and only as many parts are played as they fill. On a mesh a part is made
    large enough to be divided evenly.
    """
    episodes = alive.shape[0]
    rows = whole_rows(min(rows, episodes))
    if rows == episodes:
        reply = policy.respond(params, prefix, observation, observation_length, keys, sampling, alive)
        return _blank_where(~alive, reply)
    order = jnp.argsort(~alive, stable=True)
    order = jnp.pad(order, (0, -episodes % rows), constant_values=episodes)
    living = alive.sum(dtype=jnp.int32)

    def part(i: Array, replies: Reply) -> Reply:
        index = jax.lax.dynamic_slice_in_dim(order, i * rows, rows)
        # Clipped and later dropped: what is beyond the living is played with somebody's observation, for nothing.
        source = jnp.minimum(index, episodes - 1)
        wanted = i * rows + jnp.arange(rows) < living
        reply = policy.respond(
            params, prefix, observation[source], observation_length[source], keys[source], sampling, wanted
        )
        target = jnp.where(wanted, index, episodes)
        return jax.tree.map(lambda all_rows, some: all_rows.at[target].set(some, mode="drop"), replies, reply)

    with jax.named_scope("parts"):
        return for_count((living + rows - 1) // rows, part, Reply.blank(episodes, policy.reply_limit))


def _blank_where(over: Bool[Array, " episodes"], reply: Reply) -> Reply:
    blank = Reply.blank(over.shape[0], reply.ids.shape[1])
    return jax.tree.map(lambda no, yes: jnp.where(over.reshape(-1, *[1] * (yes.ndim - 1)), no, yes), blank, reply)
