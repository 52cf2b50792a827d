"""Episodes: against a plain replay of the game on the host, and independence of batch shapes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.anchors import state_words
from jaxgrpo.episodes import Episodes
from jaxgrpo.policy import Sampling
from jaxgrpo.rollout import Keys, play
from tests.jaxgrpo.experiments import small

PENALTY = 0.25


def episodes(experiment: Any, groups: int = 3, samples: int = 4, seed: int = 0, **options: Any) -> Episodes:
    params = experiment.init().params

    @jax.jit
    def run(params: Any, key: Any) -> Episodes:
        return play(
            experiment.policy,
            experiment.game,
            params,
            experiment.policy.prefix(params),
            key,
            groups=groups,
            samples=samples,
            sampling=Sampling(jnp.float32(1), jnp.float32(1)),
            penalty=jnp.float32(PENALTY),
            **options,
        )

    return jax.device_get(run(params, jax.random.key(seed)))


def replay(experiment: Any, played: Episodes, group: int, sample: int, seed: int, share: bool) -> None:
    """Plays an episode's actions again with the environment alone and compares everything that was recorded."""
    game = experiment.game.game
    keys = Keys.make(jax.random.key(seed), *played.success.shape)
    fold = jax.random.fold_in
    _, state = game.environment.reset(fold(fold(keys.groups[group], 0), 0), game.params)
    luck = keys.groups[group] if share else keys.samples[group, sample]
    at = (group, sample)
    for step in range(game.environment.max_steps):
        ids, length = experiment.game.observation(state)
        assert bool(played.alive[at][step]), "the episode ended too early"
        np.testing.assert_array_equal(played.observation[at][step], ids)
        assert played.observation_length[at][step] == length
        if played.anchor is not None:
            np.testing.assert_array_equal(played.anchor[at][step], state_words(state))
        action, readable = int(played.reply.action[at][step]), bool(played.reply.readable[at][step])
        _, state, reward, terminated, truncated, _ = game.environment.step(
            fold(fold(luck, 1), step), state, action, game.params
        )
        assert played.reward[at][step] == pytest.approx(float(reward) - (0 if readable else PENALTY))
        assert played.terminated[at][step] == terminated and played.truncated[at][step] == truncated
        if terminated or truncated:
            # The last observation is kept, and nothing is recorded behind the end.
            np.testing.assert_array_equal(played.observation[at][step + 1], experiment.game.observation(state)[0])
            for after in (played.reward, played.alive, played.reply.sampled, played.terminated, played.truncated):
                assert not np.any(after[at][step + 1 :])
            assert played.success[at] == game.won(state, game.params)
            return
    raise AssertionError("the episode never ended")


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"game": "frozen-lake-slippery"}, True),
        ({"game": "frozen-lake-slippery"}, False),
        ({"constrain": False, "reply_limit": 3}, True),
    ],
)
def test_recorded_episodes_are_the_games(options: dict[str, Any], share: bool):
    experiment = small(**options)
    # Recording the state is the dearest option: once is enough.
    played = episodes(experiment, share_chance=share, seed=5, record_anchor=not share)
    assert (played.anchor is None) == share
    for group in range(3):
        for sample in range(4):
            replay(experiment, played, group, sample, 5, share)


def test_a_group_shares_its_start_and_players_differ():
    played = episodes(small())
    first = played.observation[:, :, 0]
    assert (first == first[:, :1]).all()
    assert (first[0, 0] != first[1, 0]).any()
    assert len({tuple(row) for row in played.reply.action[0].tolist()}) > 1


def test_equal_actions_have_equal_luck_when_chance_is_shared():
    played = episodes(small(game="frozen-lake-slippery"), groups=8, samples=6)
    pairs = 0
    for group in range(8):
        for a in range(6):
            for b in range(a):
                same = played.reply.action[group, a, 0] == played.reply.action[group, b, 0]
                pairs += same
                if same:
                    np.testing.assert_array_equal(played.observation[group, a, 1], played.observation[group, b, 1])
    assert pairs > 20


@pytest.mark.parametrize("rows", [1, 5, 7])
def test_playing_in_parts_changes_nothing(rows: int):
    """Whatever the number of rows at a time: it need not divide the episodes, and those that are over leave."""
    whole, parts = episodes(small()), episodes(small(), rows=rows)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_episodes_do_not_depend_on_how_many_are_played():
    many, few = episodes(small(), groups=4, samples=5), episodes(small(), groups=2, samples=3)
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(few), strict=True):
        np.testing.assert_allclose(a[:2, :3], b, atol=1e-5)


def test_unreadable_replies_cost_the_penalty_and_play_the_first_action():
    played = episodes(small(constrain=False, reply_limit=2))
    assert not played.reply.readable.any()
    assert (played.reply.action == 0).all()
    np.testing.assert_allclose(played.reward.sum(-1), -PENALTY * played.alive.sum(-1))
