import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax.frozen_lake import GOAL, HOLE, FrozenLake
from envs_jax.games import GAMES, GameError, TextGame, TokenizedGame, frozen_lake_game, make_game, tokenize_game
from envs_jax.text.tokenizer import TextTokenizer, chat_messages

STATES = 300


def _lake(game: TextGame) -> FrozenLake:
    assert isinstance(game.environment, FrozenLake)
    return game.environment


@functools.cache
def _reset(lake: FrozenLake, count: int):
    """Lakes at the start of a game; equal scenarios share one compilation."""
    params = lake.make_params(success_rate=1.0)
    return jax.jit(jax.vmap(lambda key: lake.reset(key, params)[1]))(jax.random.split(jax.random.key(0), count))


def _states(game: TextGame, count: int, seed: int = 0):
    """Lakes with the player anywhere, on holes and goals too."""
    lake = _lake(game)
    places = jax.random.randint(jax.random.key(seed), (count, 2), 0, lake.size)
    return _reset(lake, count).replace(position=places)


def _state(states, i: int):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[i], states)


def _texts(game: TextGame, states) -> list[str]:
    """`game.text` of each state, with one compiled call for the slot values of all."""
    values = jax.jit(jax.vmap(lambda state: game.slot_values(state, game.params)))(states)
    texts = [game.template.text(row) for row in np.asarray(values).tolist()]
    assert texts[:2] == [game.text(_state(states, i)) for i in range(2)]
    return texts


_game = functools.cache(make_game)


@functools.cache
def _tokenized(game: TextGame, tokenizer: TextTokenizer) -> TokenizedGame:
    return tokenize_game(game, tokenizer, reply_limit=16, constrain=False)


def _prompt_ids(game: TokenizedGame, states) -> list[list[int]]:
    """Whole prompts as the model gets them: shared prefix, then the observation without its padding."""
    ids, lengths = jax.jit(jax.vmap(game.observation))(states)
    assert ids.shape[1] == game.max_tokens
    prefix = game.prefix_ids.tolist()
    return [prefix + row[len(row) - n :].tolist() for row, n in zip(np.asarray(ids), np.asarray(lengths), strict=True)]


def _assert_exact(compiled: TokenizedGame, states) -> list[str]:
    """Ids from jit equal the tokenizer applied to the whole chat-templated string; returns the observations."""
    game, tokenizer = compiled.game, compiled.tokenizer
    texts = _texts(game, states)
    for text, ids in zip(texts, _prompt_ids(compiled, states), strict=True):
        assert ids == tokenizer.encode(tokenizer.apply_chat_template(chat_messages(game.system, text)))
    return texts


@pytest.mark.parametrize("style", ["full", "short"])
@pytest.mark.parametrize("name", GAMES)
def test_prompt_ids_are_the_tokenizers_own(name, style, tokenizer):
    """Gate 1: ids from jit equal the tokenizer applied to the whole chat-templated string."""
    game = _game(name, style=style)
    texts = _assert_exact(_tokenized(game, tokenizer), _states(game, STATES))
    assert len(set(texts)) > STATES // 5  # dry 4x4 lakes with many tiles frozen repeat


@pytest.mark.parametrize("reply", ["action", "think"])
@pytest.mark.parametrize("style", ["full", "short"])
@pytest.mark.parametrize("which", ["smollm2", "qwen"])
def test_prompt_ids_are_those_of_transformers(which, style, reply, request):
    """Gate 1, against transformers' `apply_chat_template(tokenize=True)` from the same files."""
    theirs = request.getfixturevalue(f"transformers_{which}")
    game = _game("frozen-lake-ragen", style=style, reply=reply)
    states = _states(game, 40, seed=1)
    compiled = _tokenized(game, request.getfixturevalue(which))
    for text, ids in zip(_texts(game, states), _prompt_ids(compiled, states), strict=True):
        messages = chat_messages(game.system, text)
        assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_full_text_is_the_whole_prompt(tokenizer):
    game = _game("frozen-lake-ragen")
    compiled = _tokenized(game, tokenizer)
    states = _states(game, 3)
    for i, ids in enumerate(_prompt_ids(compiled, states)):
        state = _state(states, i)
        assert compiled.full_text(state) == tokenizer.apply_chat_template(game.messages(state)) == tokenizer.decode(ids)


def test_prompt_ends_with_the_assistant_header(qwen, smollm2, tiny):
    game = _game("frozen-lake")
    states = _states(game, 4)
    for tokenizer, end in (
        (qwen, "<|im_end|>\n<|im_start|>assistant\n"),
        (smollm2, "<|im_end|>\n<|im_start|>assistant\n"),
        (tiny, "<|im_end|>"),
    ):
        header = tokenizer.encode(end)
        assert all(ids[-len(header) :] == header for ids in _prompt_ids(_tokenized(game, tokenizer), states))


def test_instructions_are_in_the_shared_prefix(tokenizer):
    game = _game("frozen-lake-slippery")
    prefix = tokenizer.decode(_tokenized(game, tokenizer).prefix_ids)
    assert game.system in prefix
    assert prefix.endswith("You are at (")


@pytest.mark.parametrize("name", [name for name in GAMES if _lake(_game(name)).size == 4])
def test_a_short_step_of_tiny_is_at_most_25_tokens(name, tiny):
    game = _game(name, style="short")
    compiled = tokenize_game(game, tiny, reply_limit=3, constrain=True)
    reply = {len(tiny.encode(f"<action>{action}</action>")) for action in game.actions}
    assert reply == {3}
    assert compiled.max_tokens + 3 == 23
    assert compiled.renderer.min_tokens == compiled.max_tokens
    assert len(tiny.encode(game.system)) <= 16
    assert len(compiled.prefix_ids) <= 17


def test_end_of_reply_is_a_set(tokenizer):
    """Gate 3."""
    compiled = _tokenized(_game("frozen-lake"), tokenizer)
    assert len(compiled.eos_ids) == 2
    assert set(compiled.eos_ids) <= tokenizer.special_ids


def test_text_says_what_the_state_is():
    game = frozen_lake_game(fixed_map=("SFF", "FHF", "FFG"), success_rate=1.0)
    _, state = game.environment.reset(jax.random.key(0), game.params)
    _, state, *_ = game.environment.step(jax.random.key(0), state, 2, game.params)
    text = game.text(state)
    assert "3 rows and 3 columns" in text
    assert text.endswith("You are at (0, 1). The goal is at (2, 2).\n F P F\n F H F\n F F G")
    assert frozen_lake_game(fixed_map=("SFF", "FHF", "FFG"), style="short").text(state) == " F P F\n F H F\n F F G"


def test_text_of_random_states_against_a_plain_reading():
    game = _game("frozen-lake-ragen")
    states = _states(game, 50)
    for i in range(50):
        state = _state(states, i)
        *_, facts, row0, row1, row2, row3 = game.text(state).split("\n")
        player, (goal,) = tuple(state.position.tolist()), np.argwhere(state.board == GOAL).tolist()
        assert facts == f"You are at ({player[0]}, {player[1]}). The goal is at ({goal[0]}, {goal[1]})."
        for r, line in enumerate((row0, row1, row2, row3)):
            for c, letter in enumerate(line.split()):
                expected = {HOLE: "H", GOAL: "G"}.get(int(state.board[r, c]), "F")
                assert letter == ("P" if (r, c) == player else expected)


def test_every_goal_of_a_map_is_told(tiny):
    game = frozen_lake_game(fixed_map=("SFG", "FHF", "GFG"), success_rate=1.0)
    _, state = game.environment.reset(jax.random.key(0), game.params)
    facts = "The goal is at (0, 2). Another goal is at (2, 0). Another goal is at (2, 2)."
    assert facts in game.text(state)
    _assert_exact(_tokenized(game, tiny), _states(game, 20))


def test_lakes_wider_than_ten_are_exact(qwen):
    game = frozen_lake_game(size=12, frozen_probability=0.95, success_rate=1.0)
    compiled = _tokenized(game, qwen)
    assert compiled.renderer.min_tokens < compiled.max_tokens  # one digit or two
    _assert_exact(compiled, _states(game, 60))


def test_system_message_states_rules_actions_and_reply():
    dry, slippery = _game("frozen-lake"), _game("frozen-lake-slippery", reply="think")
    assert "always goes where you want" in dry.system
    assert "with probability 0.33" in slippery.system
    assert "have made 8 moves" in dry.system
    assert "left, down, right or up" in dry.system
    assert "<action>left</action>" in dry.system
    assert "<think>" not in dry.system
    assert "<think>your thoughts</think><plan>your plan</plan><action>left</action>" in slippery.system


def test_scenarios_are_those_of_the_list():
    def summary(name):
        game = _game(name)
        lake = _lake(game)
        numbers = (float(game.params.frozen_probability), float(game.params.success_rate))
        return lake.size, *np.round(numbers, 4).tolist(), lake.max_steps, lake.random_start, lake.random_goal

    assert {name: summary(name) for name in GAMES} == {
        "frozen-lake": (4, 0.8, 1.0, 8, False, False),
        "frozen-lake-slippery": (4, 0.9, 0.3333, 15, False, False),
        "frozen-lake-big-slippery": (6, 0.9, 0.3333, 15, False, False),
        "frozen-lake-ragen": (4, 0.8, 0.3333, 10, True, True),
    }
    assert all(_game(name).name == name for name in GAMES)


def test_options_replace_the_scenarios_own():
    game = make_game("frozen-lake", size=5, max_steps=12)
    assert (_lake(game).size, game.environment.max_steps) == (5, 12)


def test_wrong_names_are_refused_with_the_nearest():
    with pytest.raises(
        GameError, match=r"unknown game 'frozen-lak'; did you mean 'frozen-lake'\? allowed: frozen-lake, "
    ):
        make_game("frozen-lak")
    with pytest.raises(GameError, match="unknown game 'zzz'; allowed: frozen-lake"):
        make_game("zzz")
    with pytest.raises(GameError, match="style 'long' is unknown; allowed: full, short"):
        make_game("frozen-lake", style="long")
    with pytest.raises(GameError, match="reply 'speech' is unknown; allowed: action, think"):
        make_game("frozen-lake", reply="speech")


@pytest.mark.parametrize("limit", [0, -1])
def test_a_reply_needs_room(tiny, limit):
    with pytest.raises(GameError, match=f"reply limit {limit} leaves no room"):
        tokenize_game(_game("frozen-lake"), tiny, reply_limit=limit, constrain=False)


def test_constraint_is_there_when_asked_for(tiny):
    game = _game("frozen-lake", style="short")
    assert tokenize_game(game, tiny, reply_limit=3, constrain=False).constraint is None
    constraint = tokenize_game(game, tiny, reply_limit=3, constrain=True).constraint
    assert constraint is not None
    assert list(constraint.start_run) == tiny.encode("<action>")


def test_reader_reads_the_games_actions(tiny):
    compiled = _tokenized(_game("frozen-lake"), tiny)
    for index, word in enumerate(compiled.game.actions):
        state = jnp.asarray(compiled.reader.start)
        for token in tiny.encode(f"<action>{word}</action>"):
            state = compiled.reader.step(state, token)
        assert int(compiled.reader.action(state)) == index


def test_one_trace_for_all_states(tiny):
    compiled = _tokenized(_game("frozen-lake"), tiny)
    traces = []

    @jax.jit
    def observe(states):
        traces.append(None)
        return jax.vmap(compiled.observation)(states)

    for seed in range(3):
        observe(_states(compiled.game, 4, seed))
    assert len(traces) == 1
