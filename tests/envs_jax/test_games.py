import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax import players
from envs_jax.frozen_lake import GOAL, HOLE, FrozenLake
from envs_jax.games import (
    GAMES,
    GameError,
    TextGame,
    TokenizedGame,
    frozen_lake_game,
    make_game,
    snake_game,
    tokenize_game,
)
from envs_jax.snake import APPLE, BANANA, FIRE, Snake
from envs_jax.text.tokenizer import TextTokenizer, chat_messages

STATES = 300
LAKES = [name for name in GAMES if name.startswith("frozen-lake")]
SNAKES = [name for name in GAMES if name.startswith("snake")]


def _lake(game: TextGame) -> FrozenLake:
    assert isinstance(game.environment, FrozenLake)
    return game.environment


@functools.cache
def _reset(lake: FrozenLake, count: int):
    """Lakes at the start of a game; equal scenarios share one compilation."""
    params = lake.make_params(success_rate=1.0)
    return jax.jit(jax.vmap(lambda key: lake.reset(key, params)[1]))(jax.random.split(jax.random.key(0), count))


def _states(game: TextGame, count: int, seed: int = 0):
    """Lakes with the player anywhere, on holes and goals too; snakes in the course of games, dead ones too."""
    if isinstance(game.environment, Snake):
        # The time limit is not in the text: scenarios that differ in it alone share one compilation.
        return _snake_states(dataclasses.replace(game.environment, max_steps=20), count, game.params, seed)
    lake = _lake(game)
    places = jax.random.randint(jax.random.key(seed), (count, 2), 0, lake.size)
    return _reset(lake, count).replace(position=places)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _snake_states(snake: Snake, count: int, params, seed):
    """States of greedy play, each at another time of another game."""

    def state(key, time):
        def step(i, state):
            key_player, key_step = jax.random.split(jax.random.fold_in(key, i))
            return snake.step(key_step, state, players.greedy(snake, key_player, state, params), params)[1]

        return jax.lax.fori_loop(0, time, step, snake.reset(key, params)[1])

    return jax.vmap(state)(jax.random.split(jax.random.key(seed), count), jnp.arange(count) % 21)


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


_SHORT = [*LAKES, "snake-8", "snake-20-poison-banana"]  # the other snakes' short texts are snake-8's


@pytest.mark.parametrize(
    ("name", "style"), [*itertools.product(GAMES, ["full"]), *itertools.product(_SHORT, ["short"])]
)
def test_prompt_ids_are_the_tokenizers_own(name, style, tokenizer):
    """Gate 1: ids from jit equal the tokenizer applied to the whole chat-templated string."""
    game = _game(name, style=style)
    texts = _assert_exact(_tokenized(game, tokenizer), _states(game, STATES))
    assert len(set(texts)) > STATES // 5  # dry 4x4 lakes with many tiles frozen repeat


@pytest.mark.parametrize("reply", ["action", "think"])
@pytest.mark.parametrize("style", ["full", "short"])
@pytest.mark.parametrize("which", ["smollm2", "qwen"])
@pytest.mark.parametrize("name", ["frozen-lake-ragen", "snake-20-poison-banana"])
def test_prompt_ids_are_those_of_transformers(name, which, style, reply, request):
    """Gate 1, against transformers' `apply_chat_template(tokenize=True)` from the same files."""
    theirs = request.getfixturevalue(f"transformers_{which}")
    game = _game(name, style=style, reply=reply)
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


@pytest.mark.parametrize("name", [name for name in LAKES if _lake(_game(name)).size == 4])
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

    assert {name: summary(name) for name in LAKES} == {
        "frozen-lake": (4, 0.8, 1.0, 8, False, False),
        "frozen-lake-slippery": (4, 0.9, 0.3333, 15, False, False),
        "frozen-lake-big-slippery": (6, 0.9, 0.3333, 15, False, False),
        "frozen-lake-ragen": (4, 0.8, 0.3333, 10, True, True),
    }
    base = Snake()
    assert {name: (_game(name).environment, *_game(name).params.object_rewards.tolist()[1:]) for name in SNAKES} == {
        "snake-8": (dataclasses.replace(base, max_steps=8), 1, 10, -1),
        "snake-20": (dataclasses.replace(base, max_steps=20), 1, 10, -1),
        "snake-20-poison": (dataclasses.replace(base, max_steps=20), -1, 10, -1),
        "snake-20-poison-banana": (dataclasses.replace(base, apples=3, bananas=3, max_steps=20), -1, 1, -1),
        "snake-20-downhill": (dataclasses.replace(base, hill="down", max_steps=20), 1, 10, -1),
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


# Two heads and five objects (or six) of two digits, six words, the end of the message, and three tokens of reply.
@pytest.mark.parametrize(("name", "tokens"), [("snake-8", 24), ("snake-20-poison-banana", 26)])
def test_a_short_step_of_tiny_snake_is_short_fixed_in_length_and_exact(name, tokens, tiny):
    game = _game(name, style="short")
    compiled = _tokenized(game, tiny)
    assert {len(tiny.encode(f"<action>{action}</action>")) for action in game.actions} == {3}
    assert compiled.renderer.min_tokens == compiled.max_tokens == tokens - 3
    assert len(compiled.prefix_ids) <= 17
    assert len(set(_assert_exact(compiled, _states(game, STATES)))) > STATES // 2


def test_snakes_without_the_grid_are_exact(tokenizer):
    """Gate 1: variable lists of coordinates."""
    game = _game("snake-20", grid=False)
    assert len(set(_assert_exact(_tokenized(game, tokenizer), _states(game, STATES)))) > STATES // 2


@pytest.mark.parametrize(
    "options",
    [
        {"grid": False, "enemies": 2, "bananas": 1, "fires": 2, "width": 12, "height": 5, "initial_length": 2},
        {"enemies": 2, "bananas": 1, "fires": 2, "width": 12, "height": 5, "initial_length": 2},
        {"style": "short", "enemies": 2, "bananas": 1, "fires": 2, "width": 12, "height": 5, "initial_length": 2},
    ],
    ids=["no grid", "grid", "short"],
)
def test_crowds_of_snakes_on_wide_boards_are_exact(options, qwen):
    game = snake_game(max_steps=20, **options)
    assert len(set(_assert_exact(_tokenized(game, qwen), _states(game, 84)))) > 60


def _snake_state(game: TextGame, snakes, objects, **changes):
    """A state with snakes as lists of (x, y), head first, and objects {(x, y): kind}."""
    state = game.environment.reset(jax.random.key(0), game.params)[1]
    bodies, board = np.zeros_like(state.bodies), np.zeros_like(state.objects)
    for i, body in enumerate(snakes):
        for age, (x, y) in enumerate(body):
            bodies[i, y, x] = len(body) - age
    for (x, y), kind in objects.items():
        board[y, x] = kind
    heads = np.array([body[0] if body else (-1, -1) for body in snakes], np.int32)
    lengths = np.array([len(body) for body in snakes], np.int32)
    changes = {name: jnp.asarray(value) for name, value in changes.items()}
    return state.replace(bodies=bodies, heads=heads, lengths=lengths, objects=board, **changes)


def test_snake_text_says_what_the_state_is():
    options: dict[str, Any] = dict(width=5, height=4, enemies=2, apples=2, bananas=1, fires=1, max_steps=8)
    game = snake_game(**options)
    snakes = [[(1, 1), (1, 0), (0, 0)], [], [(4, 3), (3, 3)]]
    state = _snake_state(game, snakes, {(2, 1): APPLE, (0, 3): BANANA, (4, 0): FIRE})
    lists = (
        "Your head: [ (1, 1) ]\nEnemy heads: [ (4, 3) ]\nApples: [ (2, 1) ]\nBananas: [ (0, 3) ]\nFires: [ (4, 0) ]\n"
    )
    grid = " B _ _ e E\n _ _ _ _ _\n _ P A _ _\n p p _ _ F"
    text = game.text(state)
    assert "5 cells wide and 4 cells high" in text and "A an apple, B a banana, F a fire" in text
    assert text.endswith("y = 0.\n" + lists + grid)
    bodies = (
        "Your body behind the head: [ (1, 0) (0, 0) ]\nBody of enemy 1 behind the head: [ ]\n"
        "Body of enemy 2 behind the head: [ (3, 3) ]"
    )
    assert snake_game(grid=False, **options).text(state).endswith(" y upwards.\n" + lists + bodies)
    # The places of player, enemies, apples, banana and fire; up, down, left, right of the head; the way to the apple.
    short = snake_game(style="short", **options)
    assert short.text(state) == "11 _ _4321 _ _0340 _ x _ A right _"
    assert short.system == "Eat A B, avoid x F. <action>up</action>"
    dead = _snake_state(game, [[], [(0, 2)], [(3, 3)]], {(2, 1): APPLE, (3, 1): APPLE})
    assert "Your head: [ ]\nEnemy heads: [ (0, 2) (3, 3) ]\nApples: [ (2, 1) (3, 1) ]" in game.text(dead)
    assert short.text(dead) == " _ _0233" + "2131" + " _ _ _ _" + " x x x x _ _"


@pytest.mark.parametrize("name", ["snake-20-poison-banana", "snake-20-downhill"])
def test_snake_text_of_random_states_against_a_plain_reading(name):
    game = _game(name)
    states = _states(game, STATES)
    letters = {0: "_", APPLE: "A", BANANA: "B"}
    for i, text in enumerate(_texts(game, states)[:63]):
        state = _state(states, i)
        *lines, last = text.split("\n")
        rows = [*lines[-9:], last][::-1]
        cells = {(x, y): letter for y, row in enumerate(rows) for x, letter in enumerate(row.split())}
        assert len(cells) == 100
        for (x, y), letter in cells.items():
            expected = letters[int(state.objects[y, x])]
            for body, small in zip(state.bodies, "pe", strict=True):
                if body[y, x]:
                    expected = small.upper() if body[y, x] == body.max() else small
            assert letter == expected
        for title, letter in (("Your head", "P"), ("Enemy heads", "E"), ("Apples", "A"), ("Bananas", "B")):
            line = next((line for line in lines if line.startswith(f"{title}: [")), None)
            places = (
                []
                if line is None
                else [tuple(map(int, p.split(", "))) for p in line.split("(")[1:] for p in [p.split(")")[0]]]
            )
            assert places == sorted((p for p in cells if cells[p] == letter), key=lambda p: (p[1], p[0]))


def test_short_snake_lists_the_nearest_first_and_points_to_what_is_worth_eating():
    game = _game("snake-20-poison-banana", style="short")
    objects = {(9, 9): APPLE, (4, 6): APPLE, (5, 5): APPLE, (0, 0): BANANA, (2, 7): BANANA, (3, 9): BANANA}
    state = _snake_state(game, [[(4, 5)], [(9, 0)]], objects)
    assert game.text(state) == "4590" + "554699" + "273900" + " A _ _ A left up"
    assert game.system == "Eat B, avoid x A. <action>up</action>"
    poison = _game("snake-20-poison", style="short")
    assert poison.text(_snake_state(poison, [[(4, 5)], [(9, 0)]], {(5, 5): APPLE})).endswith(" _ _ _ A _ _")
    assert poison.system == "Avoid x A. <action>up</action>"


def test_snake_is_won_by_the_last_of_several_or_well_fed_at_the_limit():
    def won(name, lengths, *, truncated):
        game = _game(name)
        snakes = [[(i, y) for y in range(length)] for i, length in enumerate(lengths)]
        state = _snake_state(game, snakes, {}, terminated=not truncated, truncated=truncated)
        return bool(game.won(state, game.params))

    assert won("snake-20", (1, 0), truncated=False)
    assert not won("snake-20", (0, 1), truncated=False) and not won("snake-20", (0, 0), truncated=False)
    assert won("snake-20", (2, 1), truncated=True) and not won("snake-20", (1, 1), truncated=True)
    assert won("snake-20-poison", (1, 1), truncated=True) and not won("snake-20-poison", (2, 1), truncated=True)
    assert won("snake-20-poison-banana", (2, 1), truncated=True)


def test_the_step_reward_is_for_training_alone():
    game = _game("snake-8")
    assert game.params.step_reward == np.float32(-0.01)
    assert game.scored is game.scored and game.scored.scored is game.scored
    assert game.scored.params == game.params.replace(step_reward=game.scored.params.step_reward)
    assert game.scored.params.step_reward == 0 and game.scored.environment == game.environment
    assert _game("frozen-lake").scored is _game("frozen-lake")


def test_snake_rules_are_told():
    system = _game("snake-20-downhill").system
    assert "apples roll one cell down, until something is in the way" in system
    assert "Eating gives: apple +1." in system and "Dying gives -2." in system
    assert "or after 20 turns" in system and "no other snake is left" in system
    assert system.endswith("<action>up</action>")
    alone = snake_game(
        enemies=0, hill="up", destroy_at_bottom=True, tail_is_safe=True, apple_reward=-1.0, bananas=1, death_reward=0.0
    )
    assert "up, until the edge, where they vanish" in alone.system and "a tail that moves away" in alone.system
    assert "apple -1, banana +10" in alone.system and "Dying gives -1." in alone.system
    assert "no other snake" not in alone.system
    assert "Eating" not in snake_game(apples=0).system


def test_the_short_style_has_no_grid_to_leave_out():
    with pytest.raises(GameError, match="grid False is for the full style"):
        make_game("snake-8", style="short", grid=False)
