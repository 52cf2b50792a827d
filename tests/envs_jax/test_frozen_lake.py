import dataclasses
import functools
import itertools
from collections import Counter, deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import MAPS as GYMNASIUM_MAPS
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map, is_valid

from envs_jax import EnvironmentOptionError, FrozenLake, frozen_lake
from envs_jax.frozen_lake import FROZEN, GOAL, HOLE, MAPS

LETTERS = np.array(["F", "H", "G"])
MAPS_UNDER_TEST = [*(tuple(rows) for rows in GYMNASIUM_MAPS.values())] + [
    tuple(generate_random_map(size, p, seed)) for size, p, seed in ((2, 0.5, 0), (3, 0.6, 1), (5, 0.7, 2), (6, 0.8, 3))
]


def start_state(environment, seed=0):
    return environment.reset(jax.random.key(seed))[1]


@functools.cache
def start_board(rows):
    return start_state(FrozenLake(fixed_map=rows)).board


def make_params(**numbers):
    return FrozenLake(fixed_map="4x4").make_params(**numbers)


def gymnasium_table(rows, **options):
    """`P` as arrays `[tiles, 4, tiles]`: probability, expected reward (probability times reward), and ending."""
    table = FrozenLakeEnv(desc=list(rows), **options).P
    probability, reward, ends = np.zeros((3, len(table), 4, len(table)))
    for tile, action in itertools.product(table, range(4)):
        for p, target, r, terminated in table[tile][action]:
            probability[tile, action, target] += p
            reward[tile, action, target] += p * r
            ends[tile, action, target] += p * terminated
    return probability, reward, ends


@functools.partial(jax.jit, static_argnames="draws")
def outcomes(board, params, draws):
    """Tile landed on, reward and end `[tiles, 4, draws]` for evenly spaced uniform draws."""
    size = len(board)
    positions = jnp.stack(jnp.divmod(jnp.arange(size**2, dtype=jnp.int32), size), axis=-1)
    uniforms = (jnp.arange(draws) + 0.5) / draws

    def outcome(position, action, uniform):
        landed, reward, ends = frozen_lake._outcome(board, position, action, uniform, params)
        return landed[0] * size + landed[1], reward, ends

    every = jax.vmap(jax.vmap(jax.vmap(outcome, (None, None, 0)), (None, 0, None)), (0, None, None))
    return every(positions, jnp.arange(4, dtype=jnp.int32), uniforms)


def our_table(rows, params, draws):
    """The same from evenly spaced uniforms put through the rules, so exact to 1 / draws."""
    board = start_board(rows)
    targets, rewards, ends = map(np.asarray, outcomes(board, params, draws))
    hit = targets[..., None] == np.arange(board.size)
    table = np.stack([hit, hit * rewards[..., None], hit * ends[..., None]]).mean(axis=3)
    # `step` keeps a finished game where it is (tests/envs_jax/test_environment.py): what the rules say there is unused.
    for tile in np.flatnonzero(np.asarray(board).ravel() != FROZEN):
        table[:, tile] = 0
        table[(0, 2), tile, :, tile] = 1
    return table


@pytest.mark.parametrize("rows", MAPS_UNDER_TEST, ids=lambda rows: f"{len(rows)}x{len(rows)}")
@pytest.mark.parametrize(
    ("success_rate", "rewards"), [(1 / 3, (1, 0, 0)), (0.8, (5, -2, -1)), (0.0, (1, 0, 0)), (1.0, (1, -1, 0.5))]
)
def test_transitions_are_gymnasiums(rows, success_rate, rewards):
    draws = 600  # Divides into thirds and tenths, so that the tables agree to rounding.
    ours = our_table(rows, make_params(success_rate=success_rate, reward_schedule=rewards), draws)
    theirs = gymnasium_table(rows, success_rate=success_rate, reward_schedule=rewards)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    if success_rate == 1:
        np.testing.assert_allclose(ours, gymnasium_table(rows, is_slippery=False, reward_schedule=rewards), atol=1e-6)


def test_the_uniform_draw_splits_where_the_probabilities_say():
    params = make_params(success_rate=0.37)
    np.testing.assert_allclose(
        our_table(MAPS["4x4"], params, 4000), gymnasium_table(MAPS["4x4"], success_rate=0.37), atol=1 / 4000
    )


def test_steps_slip_at_the_rate_asked_for():
    environment, draws = FrozenLake(size=3), 5_000
    state = start_state(environment).replace(
        board=jnp.zeros((3, 3), jnp.int8), position=jnp.array([1, 1], dtype=jnp.int32)
    )
    keys = jax.random.split(jax.random.key(0), draws)
    params = environment.make_params(success_rate=0.6)
    positions = jax.vmap(environment.step, (0, None, None, None))(keys, state, 3, params)[1].position
    counts = Counter(map(tuple, np.asarray(positions).tolist()))
    expected = {(0, 1): 0.6, (1, 0): 0.2, (1, 2): 0.2}
    assert set(counts) == set(expected)
    for position, probability in expected.items():
        deviation = np.sqrt(probability * (1 - probability) / draws)
        assert abs(counts[position] / draws - probability) < 4 * deviation


def test_success_rates_are_vmapped_in_one_trace():
    environment = FrozenLake(fixed_map="4x4")
    params = environment.make_params(success_rate=np.array([0.0, 1 / 3, 1.0]))
    axes = params.replace(success_rate=0, reward_schedule=None, frozen_probability=None)
    board = start_state(environment).board
    values = jax.vmap(lambda p: frozen_lake.optimal_values(board, p, 20)[-1, 0, 0], (axes,))(params)
    alone = [frozen_lake.optimal_values(board, make_params(success_rate=s), 20)[-1, 0, 0] for s in (0, 1 / 3, 1)]
    np.testing.assert_allclose(values, alone, atol=1e-6)
    state = start_state(environment)
    moved = jax.vmap(environment.step, (None, None, None, axes))(jax.random.key(0), state, 2, params)[1].position
    np.testing.assert_array_equal(moved[2], [0, 1])


def test_fixed_maps_are_gymnasiums():
    assert {name: tuple(rows) for name, rows in GYMNASIUM_MAPS.items()} == MAPS
    for rows in (*MAPS.values(), ("FFG", "HSH", "GFF")):
        state = start_state(FrozenLake(fixed_map=rows))
        drawn = LETTERS[np.asarray(state.board)]
        drawn[tuple(state.position)] = "S"
        assert tuple("".join(row) for row in drawn) == rows


def lakes(environment, count, seed=0, params=None):
    """Boards `[count, size, size]` and starts `[count, 2]` of many resets."""
    keys = jax.random.split(jax.random.key(seed), count)
    state = jax.jit(jax.vmap(environment.reset, (0, None)))(keys, params or environment.default_params)[1]
    return np.asarray(state.board), np.asarray(state.position)


def every_board(size):
    """All boards with the start top left and the goal bottom right, solvable or not."""
    free = np.array(list(itertools.product((FROZEN, HOLE), repeat=size**2 - 2)), np.int8)
    boards = np.zeros((len(free), size**2), np.int8)
    boards[:, 1:-1], boards[:, -1] = free, GOAL
    return boards.reshape(-1, size, size)


def letters(board, start=(0, 0)):
    drawn = LETTERS[board].tolist()
    drawn[start[0]][start[1]] = "S"
    return drawn


def shortest_path(board, start=(0, 0)):
    """Length of the shortest path to a goal by breadth-first search, infinite where there is none."""
    queue, seen = deque([(tuple(start), 0)]), {tuple(start)}
    while queue:
        (row, column), length = queue.popleft()
        if board[row, column] == GOAL:
            return length
        for target in ((row + 1, column), (row, column + 1), (row - 1, column), (row, column - 1)):
            if min(target) >= 0 and max(target) < len(board) and target not in seen and board[target] != HOLE:
                seen.add(target)
                queue.append((target, length + 1))
    return np.inf


def conditional_law(candidates, p):
    """Law of iid tiles given that the lake is one of the candidates `(board, start)`; start and goal are given."""
    holes = np.array([(board == HOLE).sum() for board, _ in candidates])
    weights = p ** (candidates[0][0].size - 2 - holes) * (1 - p) ** holes
    lakes = [(board.tobytes(), tuple(start)) for board, start in candidates]
    return dict(zip(lakes, weights / weights.sum(), strict=True))


def assert_drawn_from(law, boards, starts):
    """Chi-square test at five standard deviations; nothing outside the law's support was drawn."""
    counts = Counter((board.tobytes(), tuple(start)) for board, start in zip(boards, starts.tolist(), strict=True))
    assert set(counts) <= set(law)
    common = {lake: q for lake, q in law.items() if q * len(boards) >= 5}
    assert len(common) > 1
    rare = 1 - sum(common.values())
    statistic = sum((counts[lake] - q * len(boards)) ** 2 / (q * len(boards)) for lake, q in common.items())
    if rare * len(boards) >= 5:
        observed = len(boards) - sum(counts[lake] for lake in common)
        statistic += (observed - rare * len(boards)) ** 2 / (rare * len(boards))
    freedom = len(common)
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [2, 3])
def test_random_maps_have_gymnasiums_law(size):
    environment = FrozenLake(size=size)
    solvable = [(board, (0, 0)) for board in every_board(size) if is_valid(letters(board), size)]
    for p in (0.5, 0.8):
        drawn = lakes(environment, 10_000, params=environment.make_params(frozen_probability=p))
        assert_drawn_from(conditional_law(solvable, p), *drawn)
    # The law itself, against maps that Gymnasium drew.
    theirs = ["".join(generate_random_map(size, 0.5, seed)) for seed in range(1_000)]
    boards = np.array([["SFHG".index(letter) for letter in rows] for rows in theirs])
    boards = np.array([FROZEN, FROZEN, HOLE, GOAL], np.int8)[boards].reshape(-1, size, size)
    assert_drawn_from(conditional_law(solvable, 0.5), boards, np.zeros((1_000, 2), int))


@pytest.mark.parametrize(
    ("random_start", "random_goal", "within"), [(True, False, None), (False, True, None), (True, True, 1)]
)
def test_random_ends_are_uniform_among_solvable_lakes(random_start, random_goal, within):
    environment = FrozenLake(size=2, random_start=random_start, random_goal=random_goal, solvable_within=within)
    tiles = list(itertools.product(range(2), repeat=2))
    candidates = []
    for start, goal in itertools.permutations(tiles, 2):
        if (not random_start and start != (0, 0)) or (not random_goal and goal != (1, 1)):
            continue
        for codes in itertools.product((FROZEN, HOLE), repeat=2):
            board = np.zeros((2, 2), np.int8)
            board[goal] = GOAL
            for tile, code in zip([tile for tile in tiles if tile not in (start, goal)], codes, strict=True):
                board[tile] = code
            if shortest_path(board, start) <= (within or 4):
                candidates.append((board, start))
    assert_drawn_from(conditional_law(candidates, 0.8), *lakes(environment, 10_000))


def test_random_ends_on_a_fixed_map_are_its_frozen_tiles():
    rows = ("SFH", "HFH", "GFF")
    frozen = {(0, 0), (0, 1), (1, 1), (2, 1), (2, 2)}
    boards, starts = lakes(FrozenLake(fixed_map=rows, random_start=True), 200)
    assert set(map(tuple, starts.tolist())) == frozen
    assert (boards == boards[0]).all() and boards[0, 2, 0] == GOAL
    boards, starts = lakes(FrozenLake(fixed_map=rows, random_goal=True), 200)
    assert set(map(tuple, np.argwhere(boards == GOAL)[:, 1:].tolist())) == (frozen | {(2, 0)}) - {(0, 0)}
    assert (starts == 0).all() and ((boards == HOLE) == (boards[0] == HOLE)).all()
    boards, starts = lakes(FrozenLake(fixed_map=rows, random_start=True, random_goal=True, solvable_within=1), 500)
    goals = np.argwhere(boards == GOAL)[:, 1:]
    assert len(goals) == 500 and (np.abs(goals - starts).sum(axis=1) == 1).all()
    assert len({(*s, *g) for s, g in zip(starts.tolist(), goals.tolist(), strict=True)}) == 10


def test_solvability_is_exact():
    reachable = jax.jit(jax.vmap(lambda board: frozen_lake._can_reach_goal(board, jnp.zeros(2, jnp.int32), None)))
    boards = every_board(4)
    np.testing.assert_array_equal(reachable(boards), [is_valid(letters(board), 4) for board in boards])
    winding = FrozenLake(
        fixed_map=("SFFFFFF", "HHHHHHF", "FFFFFFF", "FHHHHHH", "FFFFFFF", "HHHHHHF", "GFFFFFF"), solvable_within=30
    )
    assert shortest_path(np.asarray(start_state(winding).board)) == 30
    with pytest.raises(EnvironmentOptionError, match="no path from S to G within 29 steps"):
        dataclasses.replace(winding, solvable_within=29)


@pytest.mark.parametrize("within", [8, 11])
def test_solvable_within_bounds_the_shortest_path(within):
    environment = FrozenLake(size=5, solvable_within=within)
    boards, _ = lakes(environment, 300, params=environment.make_params(frozen_probability=0.55))
    assert max(map(shortest_path, boards)) == within - within % 2, "longer paths are cut, the longest allowed occur"


def test_start_goal_and_holes_never_overlap():
    boards, starts = lakes(FrozenLake(random_start=True, random_goal=True), 10_000)
    assert (boards[np.arange(10_000), starts[:, 0], starts[:, 1]] == FROZEN).all()
    assert ((boards == GOAL).sum(axis=(1, 2)) == 1).all()


def test_the_observation_marks_player_holes_and_goals():
    environment = FrozenLake(fixed_map=("FGF", "HFF", "SFH"))
    observation, _ = environment.reset(jax.random.key(0))
    planes = np.zeros((3, 3, 3))
    planes[2, 0, 0] = planes[1, 0, 1] = planes[2, 2, 1] = planes[0, 1, 2] = 1
    np.testing.assert_array_equal(observation, planes)


# Optimal play


@pytest.mark.parametrize(("name", "horizon", "success"), [("4x4", 100, 0.744), ("4x4", 10, 0.041), ("8x8", 200, 0.913)])
def test_optimal_success_on_the_fixed_slippery_lakes(name, horizon, success):
    environment = FrozenLake(fixed_map=name)
    values = frozen_lake.optimal_values(start_state(environment).board, environment.default_params, horizon)
    assert values.shape == (horizon + 1, environment.size, environment.size)
    assert float(values[-1, 0, 0]) == pytest.approx(success, abs=5e-4)


@pytest.mark.parametrize("rows", MAPS_UNDER_TEST[1:], ids=lambda rows: f"{len(rows)}x{len(rows)}")
def test_optimal_values_are_value_iteration_on_gymnasiums_table(rows):
    numbers = {"success_rate": 0.7, "reward_schedule": (3, -1, -0.1)}
    probability, reward, ends = gymnasium_table(rows, **numbers)
    expected = [np.zeros(len(probability))]
    for _ in range(25):
        expected.append((reward.sum(-1) + (probability - ends) @ expected[-1]).max(axis=1))
    values = frozen_lake.optimal_values(start_board(rows), make_params(**numbers), 25)
    np.testing.assert_allclose(values.reshape(26, -1), expected, atol=1e-4)


def random_values(board, params, horizon):
    """Value of uniformly random play with `horizon` steps left."""

    def back_up(values, _):
        return frozen_lake._action_values(values, board, params).mean(axis=0), None

    return jax.lax.scan(back_up, jnp.zeros(board.shape), length=horizon)[0]


def expected_success(environment, success_rate, frozen_probability):
    """Success of optimal and of random play, exactly: over all solvable boards, each with its probability."""
    params = make_params(success_rate=success_rate)
    boards, steps = every_board(environment.size), environment.max_steps
    boards = boards[[is_valid(letters(board), environment.size) for board in boards]]
    holes = (boards == HOLE).sum(axis=(1, 2))
    weights = frozen_probability ** (boards[0].size - 2 - holes) * (1 - frozen_probability) ** holes
    optimal = jax.vmap(lambda board: frozen_lake.optimal_values(board, params, steps)[-1, 0, 0])(boards)
    random = jax.vmap(lambda board: random_values(board, params, steps)[0, 0])(boards)
    return np.average(np.asarray(optimal), weights=weights), np.average(np.asarray(random), weights=weights)


@pytest.mark.parametrize(
    ("success_rate", "frozen_probability", "steps", "optimal", "random"),
    [(1.0, 0.8, 8, 1.000, 0.008), (1 / 3, 0.9, 15, 0.379, 0.065)],
    ids=["dry", "slippery"],
)
def test_expected_success_on_random_lakes(success_rate, frozen_probability, steps, optimal, random):
    exact = expected_success(FrozenLake(max_steps=steps), success_rate, frozen_probability)
    np.testing.assert_allclose(exact, (optimal, random), atol=5e-4)


def optimal_success(environment, params, episodes, seed=0):
    """Share of won episodes of optimal play, and its mean value at the starts."""

    def play(key):
        key_reset, key_steps = jax.random.split(key)
        _, first = environment.reset(key_reset, params)
        values = frozen_lake.optimal_values(first.board, params, environment.max_steps)

        def step(state, key):
            _, state, reward, *_ = environment.step(
                key, state, frozen_lake.optimal_action(values, state, params), params
            )
            return state, reward

        _, rewards = jax.lax.scan(step, first, jax.random.split(key_steps, environment.max_steps))
        return rewards.sum(), values[-1, first.position[0], first.position[1]]

    wins, values = jax.jit(jax.vmap(play))(jax.random.split(jax.random.key(seed), episodes))
    return float(wins.mean()), float(values.mean())


@pytest.mark.parametrize(
    ("environment", "numbers"),
    [
        (FrozenLake(fixed_map="4x4", max_steps=100), {}),
        (FrozenLake(max_steps=15), {"frozen_probability": 0.9}),
        (FrozenLake(random_start=True, random_goal=True, max_steps=10), {}),
    ],
    ids=["4x4", "slippery", "random-ends"],
)
def test_optimal_actions_win_what_the_values_promise(environment, numbers):
    episodes = 1_000
    won, promised = optimal_success(environment, environment.make_params(**numbers), episodes)
    assert abs(won - promised) < 4 * np.sqrt(promised * (1 - promised) / episodes)


def test_optimal_play_on_dry_lakes_loses_only_to_the_limit():
    dry = FrozenLake().make_params(success_rate=1.0)
    assert optimal_success(FrozenLake(max_steps=8, solvable_within=8), dry, 500) == (1, 1)


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 1}, "size is 1: a lake has at least 2"),
        ({"size": -3}, "size is -3: a lake has at least 2"),
        ({"fixed_map": "5x5"}, 'fixed_map is "5x5": name one of "4x4", "8x8"'),
        ({"fixed_map": ("SX", "FG")}, "fixed_map has the letter 'X': only S, F, H and G"),
        ({"fixed_map": ("SFF", "FFG")}, r"rows of \[3, 3\] tiles: it must be square"),
        ({"fixed_map": ("SF", "G")}, r"rows of \[2, 1\] tiles: it must be square"),
        ({"fixed_map": ("SS", "FG")}, "2 S and 1 G: it needs one S"),
        ({"fixed_map": ("SF", "FF")}, "1 S and 0 G: it needs one S and at least one G"),
        ({"fixed_map": ()}, "0 S and 0 G"),
        ({"fixed_map": ("SH", "HG")}, "no path from S to G"),
        ({"fixed_map": ("SH", "HG"), "random_start": True}, "no path from S to G"),
        ({"fixed_map": "8x8", "size": 4}, "size is 4 but fixed_map has 8 rows"),
        ({"solvable_within": 5}, "solvable_within is 5: no path is shorter than 6"),
        ({"random_goal": True, "solvable_within": 0}, "solvable_within is 0: no path is shorter than 1"),
        ({"fixed_map": "4x4", "random_goal": True, "solvable_within": 0}, "no path is shorter than 1"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, message):
    with pytest.raises(EnvironmentOptionError, match=message) as refusal:
        FrozenLake(**options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"success_rate": 1.5}, "success_rate is 1.5"),
        ({"success_rate": np.array([0.5, -0.1])}, "success_rate is"),
        ({"success_rate": float("nan")}, "success_rate is nan"),
        ({"frozen_probability": 0.0}, "frozen_probability is 0.0: give more than 0"),
        ({"frozen_probability": 0.01}, "of 1024 maps of size 4 none was solvable; raise it"),
        ({"reward_schedule": (1.0, 0.0)}, "give 3 numbers, for goal, hole, frozen"),
        ({"reward_schedule": (1.0, 0.0, float("inf"))}, "give 3 numbers"),
    ],
)
def test_bad_numbers_are_refused_in_one_line(numbers, message):
    with pytest.raises(EnvironmentOptionError, match=message) as refusal:
        FrozenLake().make_params(**numbers)
    assert "\n" not in str(refusal.value)


def test_equal_maps_make_equal_environments():
    assert FrozenLake(fixed_map="4x4") == FrozenLake(size=4, fixed_map=MAPS["4x4"])
    assert FrozenLake() == FrozenLake(size=4)
