"""Evaluation: players that need no model, on the same held-out episodes; summaries; refusals."""

import numpy as np
import pytest

from envs_jax.games import make_game
from envs_jax.players import players_of
from jaxgrpo.config import ConfigError, resolve
from jaxgrpo.evaluation import Outcome, evaluate_scenarios, play_without_model, summarise
from tests.jaxgrpo.experiments import small


def outcomes(name: str, episodes: int) -> dict[str, Outcome]:
    game = make_game(name, style="short").scored
    return {
        player: play_without_model(game, plays, episodes=episodes)
        for player, plays in players_of(game.environment).items()
    }


def test_optimal_play_wins_every_dry_lake_and_random_play_hardly_any():
    found = outcomes("frozen-lake", 1000)
    assert found["optimal"].success.all()
    assert 0 < found["random"].success.mean() < 0.03
    np.testing.assert_array_equal(found["optimal"].returns, 1)


def test_snake_players_keep_their_order():
    found = {player: outcome.returns.mean() for player, outcome in outcomes("snake-8", 500).items()}
    assert found["random"] < -0.5 < 0 < found["safe-random"] < 0.5 < 1.5 < found["greedy"]


def test_the_same_seed_plays_the_same_episodes_and_another_seed_others():
    game = make_game("frozen-lake-slippery", style="short")
    player = players_of(game.environment)["optimal"]
    one, again, other = (play_without_model(game, player, episodes=64, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.lengths, again.lengths)
    assert (one.lengths != other.lengths).any()


def test_a_policy_plays_the_episodes_that_players_do():
    """Whoever plays, the first observation of episode i is the same: the start states come from the seed alone."""
    experiment = small(groups=2, group_size=2)
    outcome = experiment.evaluate(experiment.init().params, episodes=32, temperature=0.0)
    again = experiment.evaluate(experiment.init().params, episodes=32, temperature=0.0)
    np.testing.assert_array_equal(outcome.lengths, again.lengths)
    assert outcome.returns.shape == (32,)
    assert (outcome.unreadable == 0).all()


def test_summary_by_hand():
    outcome = Outcome(
        returns=np.array([0.0, 1.0, 1.0, 0.0]),
        success=np.array([False, True, True, False]),
        lengths=np.array([1, 2, 3, 4]),
        unreadable=np.array([0.0, 0.5, 0.0, 0.5]),
    )
    found = summarise(outcome)
    half = 1.96 * np.std([0, 1, 1, 0], ddof=1) / 2
    assert found["return_mean"] == 0.5 and found["success_rate"] == 0.5 and found["episodes"] == 4
    assert found["return_ci95"] == pytest.approx([0.5 - half, 0.5 + half])
    assert found["episode_length"] == 2.5 and found["unreadable_rate"] == 0.25


def test_refusals_are_one_line():
    config = resolve({})
    with pytest.raises(ConfigError, match="^--episodes 0: must be at least 1"):
        evaluate_scenarios(config, ["frozen-lake"], episodes=0)
    with pytest.raises(ConfigError, match="^--temperature -1.0: must be 0 or more"):
        evaluate_scenarios(config, ["frozen-lake"], temperature=-1.0)
    with pytest.raises(ConfigError, match="holds no run"):
        evaluate_scenarios("nowhere", ["frozen-lake"])
