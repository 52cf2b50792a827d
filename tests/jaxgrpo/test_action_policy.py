"""The policy over whole actions against a plain pass over each action's text, and in the train step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrpo.action_policy import ActionPolicy, ActionTexts
from jaxgrpo.config import ConfigError, resolve
from jaxgrpo.episodes import CLOSED
from jaxgrpo.policy import Sampling
from jaxgrpo.token_statistics import Scores
from jaxgrpo.transcripts import transcript
from tests.jaxgrpo.experiments import replayed, small, updated

ACTIONS = ("up", "go left now", "go right, carefully", "down")
ROWS, TOKENS = 3, 9
LENGTHS = np.array([9, 1, 4])
BASE = small(algorithm="twosome")
TEXTS = ActionTexts.make(ACTIONS, BASE.game.tokenizer)


def policy(length: Any = "tokens") -> ActionPolicy:
    return ActionPolicy.over(TEXTS, length, dataclasses.replace(BASE.policy, reply_limit=40))


def observations(junk: int) -> np.ndarray:
    """Left-padded rows; what is in the padding depends on `junk`."""
    real, padding = (np.random.default_rng(seed).integers(0, 256, (ROWS, TOKENS)) for seed in (0, junk))
    return np.where(np.arange(TOKENS) >= TOKENS - LENGTHS[:, None], real, padding).astype(np.int32)


def plain(params: Any, length: str) -> jax.Array:
    """log pi(a | s) from whole sequences, one for each row and action, through the model without prefix or padding."""
    player, model = policy(), policy().model(params)
    prompts = [
        [*player.prefix_ids.tolist(), *observations(1)[row, TOKENS - int(LENGTHS[row]) :].tolist(), *TEXTS.opening]
        for row in range(ROWS)
    ]
    whole = [[*prompt, *text] for prompt in prompts for text in TEXTS.scored]
    ids = np.zeros((len(whole), max(map(len, whole))), np.int32)  # what is behind a sequence changes nothing in it
    for row, sequence in zip(ids, whole, strict=True):
        row[: len(sequence)] = sequence
    places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    empty = model.prefill(jnp.zeros(0, jnp.int32))
    hidden = model.forward(jnp.asarray(ids), jnp.asarray(places), jnp.ones_like(ids, bool), empty)
    log_probs = jax.nn.log_softmax(model.logits(hidden)[..., : player.vocab_size])
    scores = []
    for number, (text, words) in enumerate(zip(TEXTS.scored * ROWS, (1, 3, 3, 1) * ROWS, strict=True)):
        first = len(whole[number]) - len(text)
        taken = sum(log_probs[number, first - 1 + i, token] for i, token in enumerate(text))
        scores.append(taken / {"tokens": len(text), "words": words, "none": 1}[length])
    return jax.nn.log_softmax(jnp.stack(scores).reshape(ROWS, -1), axis=-1)


def replies_of(actions: jax.Array) -> jax.Array:
    ids = np.zeros((len(ACTIONS), 40), np.int32)
    for row, reply in zip(ids, TEXTS.replies, strict=True):
        row[: len(reply)] = reply
    return jnp.asarray(ids)[actions]


def test_texts_are_cut_where_the_words_begin_and_end():
    tokenizer = BASE.game.tokenizer
    for action, reply, scored in zip(ACTIONS, TEXTS.replies, TEXTS.scored, strict=True):
        assert tokenizer.decode(reply) == f"<action>{action}</action>"
        assert tokenizer.decode(scored) == action
        assert reply[: len(TEXTS.opening)] == TEXTS.opening
    assert max(map(len, TEXTS.scored)) > 2, "no text of several tokens"
    assert TEXTS.words == (1, 3, 3, 1)


@pytest.mark.parametrize("length", ["tokens", "words"])
def test_statistics_and_gradients_are_those_of_whole_sequences(length: Any):
    """In every row, whatever is in its padding; with a reference, and at a temperature that is applied once."""
    player, params = policy(length), BASE.init().params
    other = jax.tree.map(lambda x: x + 0.02 * jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)
    actions = jnp.array([2, 0, 1])
    weight = jnp.arange(1.0, 1 + ROWS)

    def found(params: Any, junk: int) -> Any:
        ids = jnp.asarray(observations(junk))
        scores = player.scores(params, player.prefix(params), ids, jnp.asarray(LENGTHS))
        reference = player.scores(other, player.prefix(other), ids, jnp.asarray(LENGTHS))
        return player.statistics(params, scores, replies_of(actions), jnp.float32(0.7), reference=reference)

    def tempered(params: Any) -> jax.Array:
        return jax.nn.log_softmax(plain(params, length) / 0.7, axis=-1)

    log_pi, log_rho = jax.jit(tempered)(params), jax.jit(tempered)(other)
    place = len(TEXTS.opening)
    statistics = jax.jit(found, static_argnums=1)(params, 1)
    expected = {
        "log_prob": log_pi[jnp.arange(ROWS), actions],
        "entropy": -(jnp.exp(log_pi) * log_pi).sum(-1),
        "kl": (jnp.exp(log_pi) * (log_pi - log_rho)).sum(-1),
    }
    for name, value in expected.items():
        of_slots = np.asarray(getattr(statistics, name))
        np.testing.assert_allclose(of_slots[:, place], value, rtol=1e-4, atol=1e-5, err_msg=name)
        assert not np.delete(of_slots, place, axis=1).any()
    again = jax.jit(found, static_argnums=1)(params, 2)
    np.testing.assert_allclose(again.log_prob, statistics.log_prob, rtol=1e-6)
    if length == "tokens":
        mine = jax.jit(jax.grad(lambda p: (weight * found(p, 1).log_prob.sum(-1)).sum()))(params)
        whole = jax.jit(jax.grad(lambda p: (weight * tempered(p)[jnp.arange(ROWS), actions]).sum()))(params)
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4 * float(jnp.abs(b).max()))


def test_replies_are_texts_drawn_from_the_distribution():
    player, params = policy(), BASE.init().params
    many = 2000
    ids, lengths = jnp.tile(observations(1)[2], (many, 1)), jnp.full(many, int(LENGTHS[2]))
    keys = jax.random.split(jax.random.key(3), many)

    @jax.jit
    def respond(temperature: jax.Array) -> Any:
        return player.respond(params, player.prefix(params), ids, lengths, keys, Sampling(temperature, jnp.float32(1)))

    reply = respond(jnp.float32(0.7))
    np.testing.assert_array_equal(reply.ids, replies_of(reply.action))
    assert np.all(np.asarray(reply.length) == np.array([len(r) for r in TEXTS.replies])[np.asarray(reply.action)])
    assert np.all(reply.readable) and np.all(np.asarray(reply.stop) == CLOSED)
    assert np.all(np.argwhere(np.asarray(reply.sampled))[:, 1] == len(TEXTS.opening))
    expected = np.asarray(jax.nn.softmax(jax.jit(plain, static_argnums=1)(params, "tokens")[2] / 0.7))
    shares = np.bincount(np.asarray(reply.action), minlength=len(ACTIONS)) / many
    np.testing.assert_allclose(shares, expected, atol=4 * 0.5 / many**0.5)
    np.testing.assert_allclose(np.exp(reply.log_prob.sum(-1)), expected[np.asarray(reply.action)], rtol=1e-4)
    assert set(np.asarray(respond(jnp.float32(0)).action).tolist()) == {int(expected.argmax())}


def test_the_step_learns_from_actions_at_a_ratio_of_one():
    """Of one optimiser step nothing is clipped; what was played reads as text."""
    options = {"algorithm": "twosome", "minibatches": 1, "kl_beta": 0.1, "action_length": "words"}
    experiment = small(**options)
    state, episodes = replayed(experiment)
    after, metrics = updated(experiment, state, episodes)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4) and metrics["logprob_gap"] < 1e-4
    assert metrics["clip_fraction"] == metrics["unreadable_rate"] == 0
    assert metrics["trained_tokens"] == metrics["trained_rows"] == np.asarray(episodes.alive).sum()
    assert (
        abs(metrics["kl_price"]) < 1e-5
        and abs(metrics["kl"]) < 1e-5
        and metrics["grad_norm"] > 1e-3
        and metrics["critic_loss"] > 0
    )
    assert not np.array_equal(after.params["embedding"], state.params["embedding"])
    words = experiment.game.game.actions
    for row in transcript(experiment.game, episodes):
        assert row["reply"] == f"<action>{row['action']}</action>" and row["action"] in words
        assert sum(row["sampled"]) == 1 and row["stop"] == "closed" and row["readable"]


def test_a_critic_of_tokens_is_refused():
    player, params = policy(), BASE.init().params
    scores = Scores(jnp.zeros((ROWS, 1, 64)), jnp.zeros((512, 64)))
    with pytest.raises(ValueError, match="about tokens"):
        player.statistics(params, scores, replies_of(jnp.zeros(ROWS, int)), jnp.float32(1), critic=scores)
    with pytest.raises(ValueError, match="reply limit 3: the longest action text has"):
        dataclasses.replace(player, reply_limit=3)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"top_k": 3}, "--top-k 3: means nothing to --algorithm twosome; leave it out"),
        ({"reply": "think"}, "--reply think: means nothing to --algorithm twosome"),
        ({"constrain": False}, "--constrain False: means nothing to --algorithm twosome"),
        ({"unreadable_penalty": 2.0}, "--unreadable-penalty 2.0: means nothing"),
        ({"group_filter": 0.5}, "--group-filter 0.5: means nothing"),
        ({"temperature": 0}, "--temperature 0: --algorithm twosome needs chances"),
        ({"critic": "raw"}, "--critic raw: logits are a Q of tokens"),
        ({"algorithm": "ms-grpo", "action_length": "words"}, "--action-length words: means nothing to --algorithm ms"),
    ],
)
def test_options_that_mean_nothing_to_it_are_refused(options: dict[str, Any], line: str):
    with pytest.raises(ConfigError, match=f"^{line}"):
        resolve({"algorithm": "twosome", **options})


def test_replies_of_a_real_model_are_constrained_whatever_its_preset():
    assert resolve({"algorithm": "twosome", "model": "smollm2-135m"}).play.constrain
