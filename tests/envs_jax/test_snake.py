"""Snake against a slow oracle written from the rules, explicit cases of each rule, start states, and the players."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax import EnvironmentOptionError, players
from envs_jax.snake import APPLE, BANANA, DOWN, FIRE, LEFT, NOTHING, RIGHT, UP, Snake, SnakeState, _draw_cells, choose

STEP_OF = {UP: (0, 1), DOWN: (0, -1), LEFT: (-1, 0), RIGHT: (1, 0)}
ROLL_OF = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}


class Oracle:
    """The rules in plain Python. Snakes are lists of (x, y), head first, empty when dead; objects a dictionary."""

    def __init__(self, game: Snake, rewards: dict[int, float], step_reward: float, death_reward: float, position):
        self.game, self.rewards, self.step_reward, self.death_reward = game, rewards, step_reward, death_reward
        self.snakes, self.owed, self.objects = position

    def play(self, action: int, uniforms: np.ndarray) -> tuple[float, bool]:
        """A round: the player's reward, and whether the game ended."""
        draws = iter(uniforms)
        moves = [action] + [self.enemy_move(i, next(draws)) for i in range(1, len(self.snakes))]
        targets = [
            moved(body[0], STEP_OF[move]) if body else None for body, move in zip(self.snakes, moves, strict=True)
        ]
        dead = {i for i, body in enumerate(self.snakes) if body and self.kills(i, targets)}
        reward = self.step_reward
        self.snakes = [[] if i in dead else body for i, body in enumerate(self.snakes)]
        self.owed = [0 if i in dead else owed for i, owed in enumerate(self.owed)]
        for i, body in enumerate(self.snakes):
            if not body:
                continue
            meal = self.objects.pop(targets[i], None)
            body.insert(0, targets[i])
            if meal is not None:
                reward += self.rewards[meal] if i == 0 else 0
            elif self.owed[i]:
                self.owed[i] -= 1
            else:
                body.pop()
        if self.game.hill:
            reward += self.roll()
        self.replenish(draws)
        living = sum(bool(body) for body in self.snakes)
        if 0 in dead:
            reward += -1 + self.death_reward
        return reward, not self.snakes[0] or (len(self.snakes) > 1 and living <= 1)

    def enemy_move(self, i: int, uniform: float) -> int:
        body = self.snakes[i]
        if not body:
            return 0
        own = set(self.without_tail(i) if len(body) > 2 else body)
        good = [
            m for m in range(4) if self.inside(moved(body[0], STEP_OF[m])) and moved(body[0], STEP_OF[m]) not in own
        ]
        return pick(good or list(range(4)), uniform)

    def kills(self, i: int, targets: list) -> bool:
        bodies = set()
        for j, body in enumerate(self.snakes):
            tail_leaves = self.game.tail_is_safe and len(body) > 2 and targets[j] not in self.objects
            bodies |= set(self.without_tail(j) if tail_leaves else body)
        met = any(targets[i] == target for j, target in enumerate(targets) if j != i)
        return not self.inside(targets[i]) or targets[i] in bodies or met

    def without_tail(self, i: int) -> list:
        """The body after its last cell was left; all of it while growth is owed."""
        return self.snakes[i] if self.owed[i] else self.snakes[i][:-1]

    def roll(self) -> float:
        """Rolls the apples one by one, those that lie farthest downhill first; the player's reward for it."""
        assert self.game.hill is not None
        direction, reward = ROLL_OF[self.game.hill], 0.0
        downhill = sorted(self.apples(), key=lambda place: -(place[0] * direction[0] + place[1] * direction[1]))
        for place in downhill:
            below = moved(place, direction)
            heads = {body[0]: i for i, body in enumerate(self.snakes) if body}
            if not self.inside(below):
                if self.game.destroy_at_bottom:
                    del self.objects[place]
            elif below in heads:
                del self.objects[place]
                self.owed[heads[below]] += 1
                reward += self.rewards[APPLE] if heads[below] == 0 else 0
            elif below not in self.objects and below not in self.occupied():
                self.objects[below] = self.objects.pop(place)
        return reward

    def replenish(self, draws):
        for kind, count in ((APPLE, self.game.apples), (BANANA, self.game.bananas), (FIRE, self.game.fires)):
            uniforms = [next(draws) for _ in range(count)]
            missing = count - sum(other == kind for other in self.objects.values())
            for uniform in uniforms[:missing]:
                free = [place for place in self.board() if place not in self.objects and place not in self.occupied()]
                free = [place for place in free if kind != APPLE or self.uphill(place)]
                if free:
                    self.objects[pick(free, uniform)] = kind

    def uphill(self, place) -> bool:
        if self.game.hill is None:
            return True
        x, y = ROLL_OF[self.game.hill]
        return not self.inside(moved(place, (-x, -y)))

    def inside(self, place) -> bool:
        return 0 <= place[0] < self.game.width and 0 <= place[1] < self.game.height

    def board(self) -> list:
        return [(x, y) for y in range(self.game.height) for x in range(self.game.width)]

    def occupied(self) -> set:
        return set(itertools.chain.from_iterable(self.snakes))

    def apples(self) -> list:
        return [place for place, kind in self.objects.items() if kind == APPLE]


def moved(place, step):
    return place[0] + step[0], place[1] + step[1]


def pick(choices: list, uniform: float):
    """The choice that a number from [0, 1) stands for; in float32, as drawn."""
    return choices[math.floor(np.float32(uniform) * np.float32(len(choices)))]


def position_of(state):
    """A host state as the oracle holds it: snakes, growth owed, objects."""
    snakes = []
    for body in state.bodies:
        ys, xs = np.nonzero(body)
        order = np.argsort(-body[ys, xs])
        snakes.append([(int(xs[i]), int(ys[i])) for i in order])
    owed = [int(length) - len(body) for length, body in zip(state.lengths, snakes, strict=True)]
    return snakes, owed, {(int(x), int(y)): int(state.objects[y, x]) for y, x in np.argwhere(state.objects)}


def state_of(game: Snake, snakes, objects=(), owed=None, time=0) -> SnakeState:
    """A state with these snakes (lists of (x, y), head first) and objects ({(x, y): kind})."""
    bodies = np.zeros((game.snakes, game.height, game.width), np.int32)
    board = np.zeros((game.height, game.width), np.int8)
    lengths = np.array([len(body) for body in snakes], np.int32) + np.array(owed or [0] * game.snakes, np.int32)
    for i, body in enumerate(snakes):
        for age, (x, y) in enumerate(body):
            bodies[i, y, x] = lengths[i] - age
    for (x, y), kind in dict(objects).items():
        board[y, x] = kind
    return SnakeState(
        bodies=jnp.asarray(bodies),
        heads=jnp.asarray([body[0] if body else (-1, -1) for body in snakes], jnp.int32),
        lengths=jnp.asarray(lengths),
        objects=jnp.asarray(board),
        time=jnp.int32(time),
        terminated=jnp.zeros((), jnp.bool_),
        truncated=jnp.zeros((), jnp.bool_),
    )


def on_host(state, *index):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], state)


def draws_of(game: Snake) -> int:
    return game.enemies + game.apples + game.bananas + game.fires


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def play(game: Snake, params, key, games: int, steps: int):
    """Games of a player that is mostly careful: first states, and of each step action, draws, state, reward, end."""

    def one(key):
        key_first, key_player, key_steps = jax.random.split(key, 3)
        first = game.reset(key_first, params)[1]

        def step(state, key_and_noise):
            key, (recklessness, choice) = key_and_noise
            safe = game.moves(state)[1]
            action = choose(safe | ~safe.any() | (recklessness > 0.9), choice)
            _, after, reward, terminated, _, _ = game.step(key, state, action, params)
            return after, (action, jax.random.uniform(key, (draws_of(game),)), after, reward, terminated)

        noise = jax.random.uniform(key_player, (steps, 2))
        return first, jax.lax.scan(step, first, (jax.random.split(key_steps, steps), noise))[1]

    return jax.vmap(one)(jax.random.split(key, games))


VARIANTS = {
    "default": Snake(),
    "crowded": Snake(width=5, height=4, apples=3, bananas=2, fires=2, enemies=2, tail_is_safe=True),
    "alone, to the full board": Snake(width=3, height=3, apples=4, enemies=0, initial_length=2, tail_is_safe=True),
    "roll down": Snake(width=5, height=6, apples=8, bananas=2, hill="down", initial_length=2),
    "roll up, vanish": Snake(
        width=7, height=7, apples=9, enemies=3, initial_length=2, hill="up", destroy_at_bottom=True
    ),
    "roll left, safe tails": Snake(width=5, height=5, apples=7, bananas=1, hill="left", tail_is_safe=True),
    "roll right, alone": Snake(width=6, height=4, apples=9, enemies=0, hill="right", destroy_at_bottom=True),
}
REWARDS = {APPLE: 1.5, BANANA: -4.0, FIRE: 0.25}


@pytest.mark.parametrize("name", VARIANTS)
def test_games_are_those_of_the_oracle(name):
    game, games, steps = VARIANTS[name], 120, 40
    params = game.make_params(
        apple_reward=REWARDS[APPLE], banana_reward=REWARDS[BANANA], fire_reward=REWARDS[FIRE], step_reward=-0.125
    )
    first, (actions, uniforms, states, rewards, ends) = jax.tree.map(
        np.asarray, play(game, params, jax.random.key(1), games, steps)
    )
    played, deaths, longest = 0, 0, 0
    for g in range(games):
        oracle = Oracle(game, REWARDS, -0.125, -1.0, position_of(on_host(first, g)))
        for t in range(steps):
            reward, ended = oracle.play(int(actions[g, t]), uniforms[g, t])
            state = on_host(states, g, t)
            assert position_of(state) == (oracle.snakes, oracle.owed, oracle.objects), (g, t)
            assert rewards[g, t] == pytest.approx(reward) and bool(ends[g, t]) == ended
            for body, head in zip(oracle.snakes, state.heads.tolist(), strict=True):
                assert tuple(head) == (body[0] if body else (-1, -1))
            played, longest = played + 1, max(longest, len(oracle.snakes[0]))
            if ended:
                deaths += not oracle.snakes[0]
                break
    assert played > 400 and deaths > 10 and longest > 3, "the trial must see long games, deaths and growth"
    if name == "alone, to the full board":
        assert longest == game.cells, "the trial must fill the board"


# Enemy moves are given by the number drawn for it: with all four open, 0.1 is up, 0.3 down, 0.6 left, 0.9 right.
_UP, _DOWN, _LEFT, _RIGHT = 0.1, 0.3, 0.6, 0.9
DUEL = Snake(width=6, height=6, apples=1)


@functools.partial(jax.jit, static_argnums=0)
def _play_round(game: Snake, state, action, uniforms, params):
    return game._play_round(state, action, uniforms, params)


def play_round(game: Snake, state, action: int, *uniforms: float):
    """One round with given draws (the rest 0), default rewards but no step reward; checked against the oracle."""
    draws = np.zeros(draws_of(game), np.float32)
    draws[: len(uniforms)] = uniforms
    params = game.make_params(step_reward=0)
    after, reward = _play_round(game, state, jnp.int32(action), jnp.asarray(draws), params)
    oracle = Oracle(game, {APPLE: 1, BANANA: 10, FIRE: -1}, 0, -1, position_of(on_host(state)))
    assert oracle.play(action, draws) == (float(reward), bool(after.terminated))
    position = position_of(on_host(after))
    assert position == (oracle.snakes, oracle.owed, oracle.objects)
    return position[0], position[2], float(reward), bool(after.terminated)


def test_snakes_that_swap_heads_both_die():
    state = state_of(DUEL, [[(2, 2)], [(3, 2)]], {(0, 0): APPLE})
    assert play_round(DUEL, state, RIGHT, _LEFT) == ([[], []], {(0, 0): APPLE}, -2, True)


def test_two_heads_on_one_cell_both_die_and_leave_the_apple():
    state = state_of(DUEL, [[(2, 2)], [(4, 2)]], {(3, 2): APPLE})
    assert play_round(DUEL, state, RIGHT, _LEFT) == ([[], []], {(3, 2): APPLE}, -2, True)


def test_a_wall_kills():
    state = state_of(DUEL, [[(0, 3)], [(4, 2)]], {(0, 0): APPLE})
    assert play_round(DUEL, state, LEFT, _UP) == ([[], [(4, 3)]], {(0, 0): APPLE}, -2, True)


def test_the_enemys_death_ends_the_game():
    # The enemy enters the player's neck, having ignored the player.
    state = state_of(DUEL, [[(2, 3), (2, 2)], [(3, 2)]], {(0, 0): APPLE})
    assert play_round(DUEL, state, UP, _LEFT) == ([[(2, 4), (2, 3)], []], {(0, 0): APPLE}, 0, True)


def test_the_own_tail_kills_although_it_is_about_to_leave():
    square = [(2, 2), (2, 3), (3, 3), (3, 2)]
    state = state_of(DUEL, [square, [(5, 5)]], {(0, 0): APPLE})
    assert play_round(DUEL, state, RIGHT, _UP)[0][0] == []
    safe = dataclasses.replace(DUEL, tail_is_safe=True)
    assert play_round(safe, state, RIGHT, _UP)[0][0] == [(3, 2), (2, 2), (2, 3), (3, 3)]


def test_a_safe_tail_is_none_when_its_snake_eats_or_is_of_two_cells():
    safe = dataclasses.replace(DUEL, tail_is_safe=True)
    # The enemy goes right from (3, 2): onto an apple (its tail stays) or not.
    bodies = [[(1, 3)], [(3, 2), (2, 2), (1, 2)]]
    one_of_three = 0.8  # up, down and right are open to it
    assert play_round(safe, state_of(safe, bodies, {(4, 2): APPLE}), DOWN, one_of_three)[0][0] == []
    assert play_round(safe, state_of(safe, bodies, {(0, 0): APPLE}), DOWN, one_of_three)[0][0] == [(1, 2)]
    assert play_round(safe, state_of(safe, [[(1, 3)], [(3, 2), (2, 2)]]), DOWN, 0.8)[0][0] == [(1, 2)]
    assert play_round(safe, state_of(safe, [[(2, 3)], [(3, 2), (2, 2)]]), DOWN, 0.8)[0][0] == []


def test_eating_pays_grows_and_brings_a_new_apple():
    state = state_of(DUEL, [[(2, 2), (1, 2)], [(5, 5)]], {(3, 2): APPLE})
    snakes, objects, reward, ended = play_round(DUEL, state, RIGHT, 0.9, 0.0)
    assert snakes[0] == [(3, 2), (2, 2), (1, 2)] and reward == 1 and not ended
    assert objects == {(0, 0): APPLE}


@pytest.mark.parametrize(("kind", "reward"), [(BANANA, 10), (FIRE, -1)])
def test_bananas_and_fires_pay_and_make_grow(kind, reward):
    game = dataclasses.replace(DUEL, apples=0, bananas=1, fires=1)
    objects = {(3, 2): kind, (0, 5): BANANA + FIRE - kind}
    snakes, objects, got, _ = play_round(game, state_of(game, [[(2, 2)], [(5, 5)]], objects), RIGHT, 0.9, 0.0)
    assert got == reward and snakes[0] == [(3, 2), (2, 2)] and objects[(0, 5)] == BANANA + FIRE - kind
    assert sorted(objects.values()) == [BANANA, FIRE]


def test_an_enemy_that_eats_pays_the_player_nothing():
    state = state_of(DUEL, [[(0, 0)], [(3, 3)]], {(3, 4): APPLE})
    snakes, _, reward, _ = play_round(DUEL, state, UP, _UP)
    assert snakes[1] == [(3, 4), (3, 3)] and reward == 0


def test_a_trapped_enemy_draws_from_all_moves():
    # Its own body on three sides, the wall on the fourth.
    spiral = [(0, 1), (0, 2), (1, 2), (1, 1), (1, 0), (0, 0), (2, 0)]
    state = state_of(DUEL, [[(5, 5)], spiral], {(5, 0): APPLE})
    moves = DUEL._enemy_moves
    drawn = [int(moves(state, jnp.asarray([u], jnp.float32))[0]) for u in (_UP, _DOWN, _LEFT, _RIGHT)]
    assert drawn == [UP, DOWN, LEFT, RIGHT]
    assert all(play_round(DUEL, state, DOWN, u)[0][1] == [] for u in (_UP, _DOWN, _LEFT, _RIGHT))


def test_an_enemy_avoids_walls_and_its_body_but_not_its_tail_when_longer_than_two():
    def options(body):
        state = state_of(DUEL, [[(5, 5)], body])
        uniforms = (np.arange(12, dtype=np.float32) + 0.5) / 12
        moves = [int(DUEL._enemy_moves(state, jnp.asarray([u]))[0]) for u in uniforms]
        return {move: moves.count(move) for move in set(moves)}

    assert options([(0, 0)]) == {UP: 6, RIGHT: 6}
    assert options([(0, 0), (0, 1)]) == {RIGHT: 12}
    assert options([(2, 2), (2, 3)]) == {DOWN: 4, LEFT: 4, RIGHT: 4}
    assert options([(2, 2), (2, 3), (3, 3), (3, 2)]) == {DOWN: 4, LEFT: 4, RIGHT: 4}  # the tail is to the right


def test_on_a_full_board_nothing_appears_until_a_cell_is_free():
    game = Snake(width=2, height=2, enemies=0, apples=1, tail_is_safe=True)
    state = state_of(game, [[(0, 0), (0, 1), (1, 1)]], {(1, 0): APPLE})
    snakes, objects, reward, ended = play_round(game, state, RIGHT)
    assert snakes == [[(1, 0), (0, 0), (0, 1), (1, 1)]] and objects == {} and reward == 1 and not ended
    snakes, objects, _, ended = play_round(game, state_of(game, snakes), UP)
    assert snakes[0][0] == (1, 1) and objects == {} and not ended
    assert play_round(game, state_of(game, [[(0, 0)]]), RIGHT)[1] == {(0, 0): APPLE}


def test_the_last_step_still_feeds_grows_and_brings_new_objects():
    game = dataclasses.replace(DUEL, max_steps=5)
    state = state_of(game, [[(2, 2)], [(5, 5)]], {(3, 2): APPLE}, time=4)
    _, after, reward, terminated, truncated, _ = game.step(jax.random.key(0), state, RIGHT)
    assert truncated and not terminated and reward == pytest.approx(1 - 0.01)
    snakes, _, objects = position_of(on_host(after))
    assert snakes[0] == [(3, 2), (2, 2)] and list(objects.values()) == [APPLE]


def test_death_on_the_last_step_is_no_truncation():
    game = dataclasses.replace(DUEL, max_steps=5)
    state = state_of(game, [[(0, 2)], [(5, 5)]], {(3, 2): APPLE}, time=4)
    _, _, reward, terminated, truncated, _ = game.step(jax.random.key(0), state, LEFT)
    assert terminated and not truncated and reward == pytest.approx(-2 - 0.01)


def test_of_three_snakes_the_game_goes_on_with_two():
    game = dataclasses.replace(DUEL, enemies=2)
    state = state_of(game, [[(0, 0)], [(3, 3)], [(5, 3)]], {(0, 5): APPLE})
    snakes, _, reward, ended = play_round(game, state, UP, _RIGHT, 0.5)
    assert snakes == [[(0, 1)], [(4, 3)], [(5, 2)]] and not ended
    snakes, _, reward, ended = play_round(game, state_of(game, [[(0, 0)], [], [(5, 3)]]), UP, 0.0, 0.0)
    assert snakes == [[(0, 1)], [], [(5, 4)]] and not ended and reward == 0
    # Two enemies that meet leave the player alone; and its own death ends the game whoever is left.
    assert play_round(game, state_of(game, [[(0, 0)], [(2, 3)], [(4, 3)]]), UP, _RIGHT, _LEFT)[3]
    assert play_round(game, state_of(game, [[(0, 0)], [(2, 3)], [(4, 4)]]), LEFT, _UP, _UP)[2:] == (-2, True)


HILL = Snake(width=4, height=4, apples=2, enemies=0, hill="down")


def test_an_apple_that_rolls_onto_a_head_is_eaten_and_grows_the_next_move():
    # The head goes right under the apple, which then rolls onto it.
    state = state_of(HILL, [[(0, 0)]], {(1, 1): APPLE, (3, 0): APPLE})
    snakes, objects, reward, _ = play_round(HILL, state, RIGHT, 0.0)
    assert snakes == [[(1, 0)]] and reward == 1
    assert objects == {(3, 0): APPLE, (0, 3): APPLE}  # the new one enters at the top
    state = state_of(HILL, [[(1, 0)]], objects, owed=[1])
    assert play_round(HILL, state, UP)[0] == [[(1, 1), (1, 0)]]


def test_apples_rest_on_edges_bodies_bananas_and_each_other():
    game = dataclasses.replace(HILL, apples=5, bananas=1)
    objects = {(1, 2): APPLE, (2, 1): APPLE, (2, 0): BANANA, (3, 0): APPLE, (3, 1): APPLE, (3, 3): APPLE}
    state = state_of(game, [[(0, 1), (1, 1), (1, 0)]], objects)
    # The snake goes up; its body stays under (1, 2) in (0, 1), but leaves (1, 0), and (1, 1) becomes its tail.
    snakes, after, _, _ = play_round(game, state, UP)
    assert snakes == [[(0, 2), (0, 1), (1, 1)]]
    assert after == {place: kind for place, kind in objects.items() if place != (3, 3)} | {(3, 2): APPLE}


def test_apples_at_the_bottom_vanish_where_they_are_told_to():
    game = dataclasses.replace(HILL, destroy_at_bottom=True)
    state = state_of(game, [[(0, 0)]], {(3, 0): APPLE, (3, 1): APPLE})
    assert play_round(game, state, RIGHT, 0.99)[1] == {(3, 0): APPLE, (3, 3): APPLE}
    assert play_round(HILL, state, RIGHT, 0.99)[1] == {(3, 0): APPLE, (3, 1): APPLE}


def test_no_new_apple_where_the_uphill_edge_is_taken():
    game = Snake(width=2, height=4, apples=3, enemies=0, hill="down")
    state = state_of(game, [[(0, 2)]], {(1, 3): APPLE, (1, 2): APPLE, (1, 1): APPLE})
    full = state_of(game, [[(0, 2), (0, 1)]], {(0, 3): APPLE, (1, 2): BANANA, (1, 3): APPLE})
    assert play_round(game, state, DOWN)[1].keys() == {(1, 2), (1, 1), (1, 0)}
    assert play_round(game, full, UP)[1] == {(1, 3): APPLE, (1, 2): BANANA}


OVERLAP = {
    "default": Snake(),
    "crowded": Snake(width=4, height=7, enemies=3, apples=7, bananas=4, fires=4, initial_length=2),
}


@pytest.mark.parametrize("name", OVERLAP)
def test_nothing_overlaps_at_the_start_or_later(name):
    """Gate 16."""
    game, seeds = OVERLAP[name], 10_000
    params = game.default_params

    @jax.jit
    def faults(key):
        first, (_, _, states, _, _) = play(game, params, key, seeds, 3)
        return jax.vmap(jax.vmap(fault))(jax.tree.map(lambda a, b: jnp.concatenate([a[:, None], b], 1), first, states))

    def fault(state):
        occupied = state.bodies > 0
        counts = jnp.stack([jnp.sum(state.objects == kind) for kind in (APPLE, BANANA, FIRE)])
        full = jnp.asarray([game.apples, game.bananas, game.fires])
        free = ~occupied.any(0) & (state.objects == NOTHING)
        can_enter = jnp.stack([jnp.any(free & game._uphill_edge()), free.any(), free.any()])
        cells = jnp.sum(occupied, axis=(-2, -1))
        y, x = jnp.maximum(state.heads[:, 1], 0), jnp.maximum(state.heads[:, 0], 0)
        at_head = state.bodies[jnp.arange(game.snakes), y, x]
        return jnp.stack(
            [
                jnp.any(occupied.sum(0) > 1),
                jnp.any(occupied.any(0) & (state.objects != NOTHING)),
                jnp.any(counts > full) | jnp.any((counts < full) & can_enter),
                jnp.any(jnp.where(state.alive, at_head != state.lengths, cells != 0)),
                jnp.any(cells > state.lengths),
                (state.time == 0) & jnp.any((cells != game.initial_length) | ~state.alive),
                (state.time == 0) & jnp.any(counts != full),
            ]
        )

    assert not np.asarray(faults(jax.random.key(5))).any(axis=(0, 1)).any()


def test_start_cells_are_uniform():
    game, games = VARIANTS["default"], 20_000
    states = jax.jit(jax.vmap(lambda key: game.reset(key)[1]))(jax.random.split(jax.random.key(2), games))
    bodies, objects = np.asarray(states.bodies), np.asarray(states.objects)
    for counts in (bodies[:, 0].sum(0), bodies[:, 1].sum(0), objects.astype(int).sum(0)):
        expected = counts.sum() / game.cells
        assert 60 < ((counts - expected) ** 2 / expected).sum() < 150  # 99 degrees of freedom: 99 +- 14


def test_long_snakes_start_in_straight_lines_in_all_directions():
    game = Snake(width=5, height=4, initial_length=3, apples=2)
    states = jax.jit(jax.vmap(lambda key: game.reset(key)[1]))(jax.random.split(jax.random.key(3), 400))
    seen = set()
    for g in range(400):
        for body in position_of(on_host(states, g))[0]:
            steps = {moved(a, (-b[0], -b[1])) for a, b in itertools.pairwise(body)}
            assert len(body) == 3 and len(steps) == 1
            seen |= steps
    assert seen == set(STEP_OF.values())


def test_draws_of_cells_are_those_of_picking_one_after_another():
    generator = np.random.default_rng(0)
    draw = jax.jit(jax.vmap(_draw_cells))
    free = generator.random((500, 12)) < generator.random((500, 1))
    uniforms = generator.random((500, 5)).astype(np.float32)
    wanted = generator.integers(-1, 6, 500).astype(np.int32)
    drawn = np.asarray(draw(free, uniforms, wanted))
    for row in range(500):
        left, expected = np.flatnonzero(free[row]).tolist(), []
        for uniform in uniforms[row, : max(wanted[row], 0)]:
            if left:
                expected.append(pick(left, uniform))
                left.remove(expected[-1])
        assert np.flatnonzero(drawn[row]).tolist() == sorted(expected)


def test_choices_are_in_proportion_and_the_largest_draw_stays_inside():
    allowed = jnp.asarray([False, True, False, True, True])
    uniforms = jnp.asarray((np.arange(300) + 0.5) / 300, jnp.float32)
    counts = np.bincount(np.asarray(jax.vmap(choose, (None, 0))(allowed, uniforms)), minlength=5)
    np.testing.assert_array_equal(counts, [0, 100, 0, 100, 100])
    largest = jnp.float32(1 - 2**-24)
    for n in range(1, 700):
        assert int(jnp.floor(largest * jnp.int32(n))) == n - 1


def test_rewards_are_vmapped_in_one_trace():
    game = DUEL
    params = game.make_params(apple_reward=np.array([1.0, -1.0, 3.0]), step_reward=np.array([0.0, -0.5, 1.0]))
    axes = params.replace(apple_reward=0, step_reward=0, banana_reward=None, fire_reward=None, death_reward=None)
    state = state_of(game, [[(2, 2)], [(5, 5)]], {(3, 2): APPLE})
    eat = jax.vmap(game.step, (None, None, None, axes))(jax.random.key(0), state, RIGHT, params)[2]
    np.testing.assert_allclose(eat, [1, -1.5, 4])


# Returns with no step reward and death_reward -1, measured on other code whose start states could overlap.
ANCHORS = {"uniform": (-0.81, -1.26), "safe": (0.21, 0.49), "greedy": (1.97, 4.52)}


def test_players_earn_what_is_known():
    game = Snake(max_steps=20)
    params = game.make_params(step_reward=0)
    choices = [functools.partial(getattr(players, name), game) for name in ANCHORS]

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0))
    @functools.partial(jax.vmap, in_axes=(0, None))
    def returns(key, player):
        def step(state, key):
            key_player, key_step = jax.random.split(key)
            action = jax.lax.switch(player, choices, key_player, state, params)
            _, state, reward, *_ = game.step(key_step, state, action, params)
            return state, reward

        rewards = jax.lax.scan(step, game.reset(key, params)[1], jax.random.split(key, game.max_steps))[1]
        return jnp.stack([rewards[:8].sum(), rewards.sum()])

    means = returns(jax.random.split(jax.random.key(0), 3_000), jnp.arange(len(ANCHORS))).mean(axis=1)
    np.testing.assert_allclose(means, list(ANCHORS.values()), atol=0.15)


def test_safe_and_greedy_players_choose_as_they_say():
    game = dataclasses.replace(DUEL, bananas=1)
    params = game.make_params(apple_reward=-1, banana_reward=1)
    keys = jax.random.split(jax.random.key(0), 64)
    choices = jax.jit(
        lambda state: [jax.vmap(lambda k, p=p: p(game, k, state, params))(keys) for p in (players.safe, players.greedy)]
    )

    def options(*position):
        return [set(np.asarray(actions).tolist()) for actions in choices(state_of(game, *position))]

    # A wall to the left, the enemy above, poison below.
    assert options([[(0, 2)], [(0, 3)]], {(0, 1): APPLE, (5, 5): BANANA}) == [{DOWN, RIGHT}, {RIGHT}]
    assert options([[(2, 2)], [(5, 0)]], {(2, 1): APPLE, (4, 5): BANANA}) == [{UP, DOWN, LEFT, RIGHT}, {UP, RIGHT}]
    assert options([[(2, 2)], [(5, 0)]], {(2, 1): APPLE}) == [{UP, DOWN, LEFT, RIGHT}, {UP, LEFT, RIGHT}]
    # Only poison is safe; then nothing is.
    corner = [(0, 0), (0, 1)]
    assert options([corner, [(5, 0)]], {(1, 0): APPLE, (4, 4): BANANA}) == [{RIGHT}, {RIGHT}]
    assert options([corner, [(1, 0)]], {(4, 4): BANANA})[0] == {UP, DOWN, LEFT, RIGHT}


def test_a_safe_move_may_follow_its_own_tail_where_tails_are_safe():
    square = [(2, 2), (2, 3), (3, 3), (3, 2)]
    state = state_of(DUEL, [square, [(2, 1)]])
    assert DUEL.moves(state)[1].tolist() == [False, False, True, False]
    assert dataclasses.replace(DUEL, tail_is_safe=True).moves(state)[1].tolist() == [False, False, True, True]


def test_observation_shows_heads_bodies_and_objects():
    game = Snake(width=4, height=3, enemies=2, bananas=1, fires=1, apples=1)
    objects = {(0, 0): APPLE, (1, 0): BANANA, (2, 0): FIRE}
    state = state_of(game, [[(0, 1), (0, 2)], [(3, 2)], []], objects)
    planes = np.moveaxis(np.asarray(game.observe(state, game.default_params)), -1, 0)
    expected = np.zeros((7, 3, 4))
    expected[0, 1, 0] = expected[2, 2, 3] = expected[4, 0, 0] = expected[5, 0, 1] = expected[6, 0, 2] = 1
    expected[1, 1, 0], expected[1, 2, 0], expected[3, 2, 3] = 2 / 12, 1 / 12, 1 / 12
    np.testing.assert_allclose(planes, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 1}, "the board is 1 x 10: give at least 2"),
        ({"enemies": -1}, "enemies is -1"),
        ({"fires": -2}, "fires is -2"),
        ({"hill": "north"}, "hill is 'north': apples roll up, down, left or right"),
        ({"hill": "up", "fires": 1}, "a hill has no fires"),
        ({"destroy_at_bottom": True}, "destroy_at_bottom is True without a hill"),
        ({"initial_length": 0}, "a snake has at least 1 cell"),
        ({"width": 2, "height": 2, "apples": 3}, "2 snakes of 1 and 3 objects need more than the 4 cells"),
        ({"initial_length": 10, "apples": 1}, "initial_length is 10: with 1 enemies, straight snakes may not all fit"),
        ({"initial_length": 11, "enemies": 0}, "initial_length is 11: with 0 enemies"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, message):
    with pytest.raises(EnvironmentOptionError, match=message) as refusal:
        Snake(**options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["apple_reward", "banana_reward", "fire_reward", "step_reward", "death_reward"])
def test_rewards_that_are_no_numbers_are_refused(name):
    with pytest.raises(EnvironmentOptionError, match=f"{name} is nan: give a finite number"):
        Snake().make_params(**{name: float("nan")})
