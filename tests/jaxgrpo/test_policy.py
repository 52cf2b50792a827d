"""The language-agent policy: replies as sampled, and the statistics that training sees of them."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from envs_jax.text.grammar import Constraint, Reader
from envs_jax.text.tokenizer import TextTokenizer
from jaxgrpo.episodes import CLOSED, CUT, ENDED, Reply
from jaxgrpo.model import chunks
from jaxgrpo.policy import LanguageAgentPolicy, Sampling
from tests.jaxgrpo.experiments import small
from tests.jaxgrpo.jaxprs import selected_shapes

ROWS, TOKENS = 12, 9
KEYS = jax.random.split(jax.random.key(7), ROWS)
# Word lists whose spellings share beginnings and ends, so that forced runs stand between two choices.
FORKED = ("go far north now", "go far south now", "stay here", "go far north later")


def sampling(temperature: float = 1.0, top_p: float = 1.0) -> Sampling:
    return Sampling(jnp.float32(temperature), jnp.float32(top_p))


@pytest.fixture(scope="module")
def params() -> Any:
    return small().init().params


@pytest.fixture(scope="module")
def observation() -> tuple[jax.Array, jax.Array]:
    """Left-padded rows of random tokens; the padding is not zero, and must not matter."""
    ids = jax.random.randint(jax.random.key(3), (ROWS, TOKENS), 5, 400)
    return ids, jnp.asarray(np.arange(ROWS) % TOKENS + 1, jnp.int32)


def policy(actions: tuple[str, ...] = ("left", "down", "right", "up"), **changes: Any) -> LanguageAgentPolicy:
    """The embedded model as a player; `constrain=False` frees its replies."""
    tokenizer = TextTokenizer.tiny()
    constrain, form = changes.pop("constrain", True), changes.pop("reply", "action")
    return dataclasses.replace(
        small().policy,
        reader=Reader.compile(actions, tokenizer),
        constraint=Constraint.compile(actions, tokenizer, reply=form) if constrain else None,
        **{"reply_limit": 16, **changes},
    )


THINK = {"reply": "think", "reply_limit": 40}
# Free replies that one token in ten ends, so that rows are done after unequal times.
RAGGED = {"constrain": False, "reply_limit": 40, "eos_ids": tuple(range(5, 55))}


def respond(player: LanguageAgentPolicy, params: Any, observation: Any, sampling: Sampling, keys: Any = KEYS) -> Reply:
    @jax.jit
    def run(params: Any, ids: Any, length: Any, keys: Any) -> Reply:
        return player.respond(params, player.prefix(params), ids, length, keys, sampling)

    return run(params, *observation, keys)


def statistics(player: LanguageAgentPolicy, params: Any, observation: Any, reply: Reply, temperature: float) -> Any:
    @jax.jit
    def run(params: Any, ids: Any, length: Any, reply: Reply) -> Any:
        prefix = player.prefix(params)
        return player.token_statistics(params, prefix, ids, length, reply.ids, reply.length, jnp.float32(temperature))

    return run(params, *observation, reply)


SETTINGS = {
    "constrained": ({}, sampling(), 1.0),
    "constrained, temperature": ({}, sampling(0.6), 0.6),
    "forced runs in the middle": ({"actions": FORKED}, sampling(), 1.0),
    "free": ({"constrain": False}, sampling(), 1.0),
    "free, temperature": ({"constrain": False}, sampling(0.6), 0.6),
    "free, top-k": ({"constrain": False, "top_k": 5}, sampling(0.9), 0.9),
    "free, top-p": ({"constrain": False, "truncate_top_p": True}, sampling(1.0, 0.7), 1.0),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_training_sees_the_log_probabilities_that_were_sampled(name: str, params: Any, observation: Any):
    changes, how, temperature = SETTINGS[name]
    player = policy(**changes)
    reply = respond(player, params, observation, how)
    found = statistics(player, params, observation, reply, temperature)
    assert int(reply.sampled.sum()) >= ROWS
    gap = jnp.where(reply.sampled, found.log_prob - reply.log_prob, 0.0)
    assert float(jnp.abs(gap).max()) < 1e-4
    assert bool((reply.log_prob[reply.sampled] < 0).all())
    np.testing.assert_array_equal(reply.log_prob[~reply.sampled], 0)


@pytest.mark.parametrize("actions", [("left", "down", "right", "up"), FORKED])
def test_constrained_replies_are_the_tokenizers_own_spelling(actions: tuple[str, ...], params: Any, observation: Any):
    player, tokenizer = policy(actions=actions), TextTokenizer.tiny()
    reply = respond(player, params, observation, sampling())
    for row in range(ROWS):
        ids = np.asarray(reply.ids[row, : int(reply.length[row])]).tolist()
        assert ids == tokenizer.encode(f"<action>{actions[int(reply.action[row])]}</action>")
    assert bool(reply.readable.all()) and bool((reply.stop == CLOSED).all())
    assert len(set(np.asarray(reply.action).tolist())) > 1
    first, last = player.sampled_span
    assert not bool(reply.sampled[:, :first].any()) and not bool(reply.sampled[:, last:].any())


def test_forced_runs_between_choices_take_one_pass_each():
    player = policy(actions=FORKED)
    assert player.constraint is not None and player.constraint.max_middle_run > 0
    assert player._block_width == 1 + player.constraint.max_middle_run


@pytest.mark.parametrize("changes", [{}, {"constrain": False}, {"actions": FORKED}])
def test_a_row_does_not_depend_on_neighbours_padding_or_batch_size(changes: Any, params: Any, observation: Any):
    player, (ids, length) = policy(**changes), observation
    together = respond(player, params, observation, sampling())
    padded = jnp.pad(ids, ((0, 0), (4, 0)), constant_values=11)
    more_padding = respond(player, params, (padded, length), sampling())
    some = jnp.array([7, 2])
    few = respond(player, params, (ids[some], length[some]), sampling(), KEYS[some])
    for whole, wider, part in zip(together, more_padding, few, strict=True):
        if whole.dtype == jnp.float32:
            np.testing.assert_allclose(whole, wider, atol=1e-5)
            np.testing.assert_allclose(whole[some], part, atol=1e-5)
        else:
            np.testing.assert_array_equal(whole, wider)
            np.testing.assert_array_equal(whole[some], part)


@pytest.mark.parametrize("constrain", [True, False])
def test_temperature_zero_is_greedy(constrain: bool, params: Any, observation: Any):
    player = policy(constrain=constrain)
    first = respond(player, params, observation, sampling(0.0))
    again = respond(player, params, observation, sampling(0.0), jax.random.split(jax.random.key(99), ROWS))
    np.testing.assert_array_equal(first.ids, again.ids)
    assert bool(jnp.isfinite(first.log_prob).all())


def test_a_reply_limit_of_one_works_and_is_unreadable(params: Any, observation: Any):
    reply = respond(policy(constrain=False, reply_limit=1), params, observation, sampling())
    np.testing.assert_array_equal(reply.length, 1)
    assert not bool(reply.readable.any())
    np.testing.assert_array_equal(reply.action, 0)


def test_a_constrained_reply_cut_by_the_limit_is_flagged(params: Any, observation: Any):
    reply = respond(policy(reply_limit=2), params, observation, sampling())
    np.testing.assert_array_equal(reply.stop, CUT)
    np.testing.assert_array_equal(reply.length, 2)
    assert not bool(reply.readable.any())


def test_replies_that_never_close_end_at_the_limit_and_eos_ends_them_early(params: Any, observation: Any):
    never = respond(policy(constrain=False, eos_ids=(), reply_limit=6), params, observation, sampling())
    np.testing.assert_array_equal(never.length, 6)
    np.testing.assert_array_equal(never.stop, CUT)
    # Whatever came second ends the turn, in a set with an id that never comes.
    second = tuple(sorted({int(never.ids[0, 1]), 500}))
    ended = respond(policy(constrain=False, eos_ids=second, reply_limit=6), params, observation, sampling())
    assert int(ended.stop[0]) == ENDED and int(ended.length[0]) <= 2
    length = int(ended.length[0])
    assert bool(ended.sampled[0, length - 1]), "the token that ended the turn was sampled and is trained"
    np.testing.assert_array_equal(ended.ids[0, length:], 0)


def test_nobody_waits_for_rows_that_do_not_play(params: Any, observation: Any):
    player = policy(constrain=False)
    playing = jnp.arange(ROWS) % 3 == 0

    @jax.jit
    def run(params: Any, ids: Any, length: Any) -> Reply:
        return player.respond(params, player.prefix(params), ids, length, KEYS, sampling(), playing)

    some, everyone = run(params, *observation), respond(player, params, observation, sampling())
    np.testing.assert_array_equal(some.length[~playing], 0)
    np.testing.assert_array_equal(some.ids[playing], everyone.ids[playing])
    np.testing.assert_allclose(some.log_prob[playing], everyone.log_prob[playing], atol=1e-5)


def test_ids_beyond_the_tokenizer_are_never_sampled(params: Any, observation: Any):
    player = policy(constrain=False, vocab_size=40, eos_ids=())
    reply = respond(player, params, observation, sampling(5.0))
    assert int(reply.ids.max()) < 40
    found = statistics(player, params, observation, reply, 5.0)
    np.testing.assert_allclose(found.log_prob, reply.log_prob, atol=1e-4)


def test_gradient_comes_from_sampled_tokens_alone(params: Any, observation: Any):
    """Whatever stands in padding, behind a reply's end or in slots that were forced, the statistics do not move."""
    player = policy(constrain=False, reply_limit=5)
    reply = respond(player, params, observation, sampling())
    ids, length = observation

    def gradient(ids: jax.Array, reply_ids: jax.Array) -> Any:
        def total(params: Any) -> jax.Array:
            prefix = player.prefix(params)
            found = player.token_statistics(params, prefix, ids, length, reply_ids, reply.length, jnp.float32(1))
            return jnp.sum(jnp.where(reply.sampled, found.log_prob + found.entropy, 0.0))

        return jax.jit(jax.value_and_grad(total))(params)

    value, grads = gradient(ids, reply.ids)
    padding = jnp.arange(TOKENS) < TOKENS - length[:, None]
    behind = jnp.arange(player.reply_limit) >= reply.length[:, None]
    other = gradient(jnp.where(padding, 3, ids), jnp.where(behind, 123, reply.ids))
    np.testing.assert_allclose(value, other[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_gradient_flows_through_the_shared_prefix(params: Any, observation: Any):
    """The prefix is computed once for all rows, and its gradient is that of the prompt written out in every row."""
    player, rows = policy(), 3
    reply = respond(player, params, observation, sampling())
    ids, length = (x[:rows] for x in observation)
    lengths, chosen = np.asarray(length), np.asarray(reply.ids)
    assert player.constraint is not None and player.constraint.choices is not None
    choices = player.constraint.choices[player.constraint.forced_next[player.constraint.start]]

    def shared(params: Any) -> jax.Array:
        found = player.token_statistics(
            params, player.prefix(params), ids, length, reply.ids[:rows], reply.length[:rows], jnp.float32(1)
        )
        return jnp.sum(found.log_prob)

    def written_out(params: Any) -> jax.Array:
        model = nnx.merge(player.graphdef, params)
        empty = model.prefill(jnp.zeros(0, jnp.int32))
        total = jnp.float32(0)
        for row in range(rows):
            shown = ids[row, TOKENS - lengths[row] :]
            tokens = jnp.concatenate([jnp.asarray(player.prefix_ids, jnp.int32), shown, chosen[row, :1]])[None]
            at = jnp.arange(tokens.shape[1])[None]
            hidden = model.forward(tokens, at, jnp.ones_like(tokens, bool), empty)[0, -1]
            log_probs = jax.nn.log_softmax(model.logits(hidden)[choices])
            total += log_probs[choices.tolist().index(chosen[row, 1])]
        return total

    ours, theirs = (jax.jit(jax.value_and_grad(f))(params) for f in (shared, written_out))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(theirs[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def assert_same_replies(ours: Reply, theirs: Reply) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 if a.dtype == jnp.float32 else 0)


@pytest.mark.parametrize("spare", [0, 33])
def test_constrained_thoughts_close_in_time_and_training_sees_the_same_mask(
    spare: int, params: Any, observation: Any, monkeypatch: pytest.MonkeyPatch
):
    """From the shortest limit on every reply is readable; the vocabulary is gone through in several, uneven chunks."""
    monkeypatch.setattr(chunks, "_LARGEST_CHUNK", 200)
    constraint, tokenizer = policy(**THINK).constraint, TextTokenizer.tiny()
    assert constraint is not None
    shortest = int(constraint.distance[constraint.start])
    player = policy(reply="think", reply_limit=shortest + spare)
    reply = respond(player, params, observation, sampling(0.8))
    assert bool(reply.readable.all()) and bool((reply.stop == CLOSED).all())
    assert int(reply.length.max()) == shortest + spare, "an untrained model goes on until the limit bites"
    form = r"<think>.*</think><plan>.*</plan><action>(left|down|right|up)</action>"
    for ids, length in zip(np.asarray(reply.ids), np.asarray(reply.length), strict=True):
        assert re.fullmatch(form, tokenizer.decode(ids[:length].tolist()), re.DOTALL)
    first, last = player.sampled_span
    assert not bool(reply.sampled[:, :first].any()) and not bool(reply.sampled[:, last:].any())
    assert bool((reply.log_prob[reply.sampled] < 0).all()), "tokens without an alternative are not sampled"
    np.testing.assert_array_equal(reply.log_prob[~reply.sampled], 0)
    found = statistics(player, params, observation, reply, 0.8)
    written = jnp.arange(player.reply_limit) < reply.length[:, None]
    gap = jnp.where(written[:, first:last], (found.log_prob - reply.log_prob)[:, first:last], 0.0)
    # Forced tokens included, and those that the number of tokens left decided: they are certain in training too.
    assert float(jnp.abs(gap).max()) < 1e-4


def test_a_limit_below_the_shortest_thought_is_refused():
    with pytest.raises(ValueError, match="reply limit 6: a constrained reply needs up to 7; give as many"):
        policy(reply="think", reply_limit=6)


def test_forced_runs_in_thoughts_go_in_one_pass_or_several(
    params: Any, observation: Any, monkeypatch: pytest.MonkeyPatch
):
    """The same replies; and other neighbours, padding and batch size do not show either."""
    (ids, length), some = observation, jnp.array([7, 2, 10])
    narrow = respond(policy(**THINK), params, observation, sampling())
    player = policy(**THINK)
    assert player.constraint is not None and player.constraint.max_middle_run > 0 and player._block_width == 1
    monkeypatch.setattr(LanguageAgentPolicy, "_block_width", 1 + player.constraint.max_middle_run)
    padded = jnp.pad(ids[some], ((0, 0), (4, 0)), constant_values=11)
    wide = respond(player, params, (padded, length[some]), sampling(), KEYS[some])
    assert_same_replies(jax.tree.map(lambda x: x[some], narrow), wide)


def test_nobody_sees_that_finished_rows_leave_the_batch(params: Any, observation: Any):
    """Alone and under vmap, where a member waits for the others before it goes on in a smaller batch."""
    shrinking, whole = (policy(**RAGGED, fewest_rows=rows) for rows in (2, ROWS))
    ids, length = observation
    keys = jnp.stack([KEYS, jax.random.split(jax.random.key(8), ROWS)])

    def members(player: LanguageAgentPolicy, params: Any) -> Reply:
        def one(keys: Any) -> Reply:
            return player.respond(params, player.prefix(params), ids, length, keys, sampling())

        return jax.vmap(one)(keys)

    expected = [respond(whole, params, observation, sampling(), member) for member in keys]
    lengths = np.asarray(expected[0].length)
    assert len(set(lengths.tolist())) > ROWS / 2 and np.median(lengths) < 20, "rows end after unequal times"
    both = jax.jit(members, static_argnums=0)(shrinking, params)
    for member, reply in enumerate(expected):
        assert_same_replies(reply, jax.tree.map(lambda x, member=member: x[member], both))
    selected = selected_shapes(jax.make_jaxpr(lambda params: members(shrinking, params))(params))
    config = shrinking.model(params).config
    assert not [shape for shape in selected if shape[-2:] == (config.kv_heads, config.head_dim)]
