"""Frozen Lake: cross the ice to the goal without falling into a hole.

Transitions, rewards and the law of the random maps are those of Gymnasium 1.4's `FrozenLake-v1`; the maps are drawn
inside jit from the reset key. `optimal_values` and `optimal_action` play it perfectly, for comparison and for tests.
"""

import dataclasses
import functools
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Float32, Int8, Int32, Key, PRNGKeyArray

from envs_jax.environment import Environment, EnvironmentOptionError, EnvironmentState

LEFT, DOWN, RIGHT, UP = range(4)
FROZEN, HOLE, GOAL = range(3)

MAPS = {
    "4x4": ("SFFF", "FHFH", "FFFH", "HFFG"),
    "8x8": ("SFFFFFFF", "FFFFFFFF", "FFFHFFFF", "FFFFFHFF", "FFFHFFFF", "FHHFFFHF", "FHFFHFHF", "FFFHFFFG"),
}

# (row, column) change of each action, in the order of the actions: two neighbours in this cycle are perpendicular.
_MOVES = np.array([(0, -1), (1, 0), (0, 1), (-1, 0)], np.int32)
_TURNS = np.array([-1, 0, 1], np.int32)


@typing.no_type_check
class FrozenLakeParams(struct.PyTreeNode):
    """Numbers of the game; `FrozenLake.make_params` builds them checked.

    Attributes:
        success_rate: probability of moving where the action says, 0 to 1; each of the two perpendicular directions
            has half of the rest. 1 is a dry lake, 1/3 Gymnasium's slippery one.
        reward_schedule: reward for landing on a goal, a hole and a frozen tile, in this order.
        frozen_probability: probability that a tile of a random map is frozen, above 0 and at most 1.
    """

    success_rate: Float[Array, "..."]
    reward_schedule: Float[Array, "... 3"]
    frozen_probability: Float[Array, "..."]


@typing.no_type_check
class FrozenLakeState(EnvironmentState):
    """A lake and a player on it.

    Attributes:
        board: `FROZEN` (0), `HOLE` (1) or `GOAL` (2) for each tile, row 0 on top. The start tile is a frozen one.
        position: the player's (row, column).
    """

    board: Int8[Array, "... size size"]
    position: Int32[Array, "... 2"]


@dataclasses.dataclass(frozen=True)
class FrozenLake(Environment[FrozenLakeState, FrozenLakeParams]):
    """Frozen Lake on a square board. Actions: 0 left, 1 down, 2 right, 3 up; a move off the board stays.

    Without `fixed_map` every reset draws a map as Gymnasium's `generate_random_map` does: each tile frozen with
    probability `params.frozen_probability`, start top left, goal bottom right, all redrawn until the goal can be
    reached. The redrawing has no bound: where hardly any map qualifies (`make_params` refuses that) it takes for ever.

    The observation is float32 `[size, size, 3]`: planes of ones for the player, the holes and the goals.

    Attributes:
        size: side of the board, at least 2. 0, the default, is the fixed map's side, or 4 where there is none.
        fixed_map: "4x4" or "8x8" (Gymnasium's), or rows of the letters S (start, exactly one), F (frozen), H (hole)
            and G (goal, at least one, reachable).
        random_start: draw the start as well. On a random map it is uniform over the tiles other than the goal, and
            made frozen; on a fixed map, uniform over the frozen tiles. Redrawn with the map until the goal can be
            reached.
        random_goal: draw the goal as well, likewise; the goals of a fixed map become frozen tiles.
        solvable_within: redraw until the shortest path to a goal has at most this many steps (dry).
    """

    size: int = 0
    fixed_map: str | tuple[str, ...] | None = None
    random_start: bool = False
    random_goal: bool = False
    solvable_within: int | None = None

    def __post_init__(self):
        super().__post_init__()
        # Normalised, so that "4x4" and its rows, or size 0 and size 4, make equal environments.
        if self.fixed_map is None:
            object.__setattr__(self, "size", self.size or 4)
        else:
            object.__setattr__(self, "fixed_map", _checked_map(self.fixed_map, self.size))
            object.__setattr__(self, "size", len(self.fixed_map))
        if self.size < 2:
            raise EnvironmentOptionError(f"size is {self.size}: a lake has at least 2 tiles a side")
        self._check_solvable_within()

    @property
    def default_params(self) -> FrozenLakeParams:
        """Gymnasium's: success rate 1/3, 1 for the goal, tiles frozen with probability 0.8."""
        return FrozenLakeParams(
            success_rate=jnp.asarray(1 / 3, jnp.float32),
            reward_schedule=jnp.asarray([1, 0, 0], jnp.float32),
            frozen_probability=jnp.asarray(0.8, jnp.float32),
        )

    def make_params(
        self,
        *,
        success_rate: ArrayLike = 1 / 3,
        reward_schedule: Sequence[int | float] | Array | np.ndarray = (1.0, 0.0, 0.0),
        frozen_probability: ArrayLike = 0.8,
    ) -> FrozenLakeParams:
        """Checked parameters from concrete numbers (or batches of them); see `FrozenLakeParams`.

        Raises:
            EnvironmentOptionError: a number is out of its range, or `frozen_probability` is so small that of 1,024
                random maps none is solvable as asked.
        """
        success_rate, frozen_probability = np.asarray(success_rate), np.asarray(frozen_probability)
        if not np.all((success_rate >= 0) & (success_rate <= 1)):
            raise EnvironmentOptionError(f"success_rate is {success_rate}: it is a probability, from 0 to 1")
        if not np.all((frozen_probability > 0) & (frozen_probability <= 1)):
            raise EnvironmentOptionError(f"frozen_probability is {frozen_probability}: give more than 0, at most 1")
        rewards = np.asarray(reward_schedule)
        if rewards.shape[-1:] != (3,) or not np.all(np.isfinite(rewards)):
            raise EnvironmentOptionError(
                f"reward_schedule is {reward_schedule}: give 3 numbers, for goal, hole, frozen"
            )
        if self.fixed_map is None:
            self._check_frozen_probability(float(frozen_probability.min()))
        return FrozenLakeParams(
            success_rate=jnp.asarray(success_rate, jnp.float32),
            reward_schedule=jnp.asarray(rewards, jnp.float32),
            frozen_probability=jnp.asarray(frozen_probability, jnp.float32),
        )

    @property
    def num_actions(self) -> int:
        """Four: left, down, right, up."""
        return 4

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """`(size, size, 3)`."""
        return (self.size, self.size, 3)

    def reset_env(self, key: PRNGKeyArray, params: FrozenLakeParams) -> FrozenLakeState:
        """Place the player on the start of the fixed map or of a random one."""
        board, start = self._draw_lake(key, params.frozen_probability)
        false = jnp.zeros((), jnp.bool_)
        time = jnp.zeros((), jnp.int32)
        return FrozenLakeState(board=board, position=start, time=time, terminated=false, truncated=false)

    def step_env(
        self, key: PRNGKeyArray, state: FrozenLakeState, action: Int32[Array, ""], params: FrozenLakeParams
    ) -> tuple[FrozenLakeState, Float[Array, ""]]:
        """Slip and move, with one uniform draw."""
        uniform = jax.random.uniform(key)
        position, reward, terminated = _outcome(state.board, state.position, action, uniform, params)
        return state.replace(position=position, terminated=terminated), reward

    def observe(self, state: FrozenLakeState, params: FrozenLakeParams) -> Float32[Array, "size size 3"]:
        """Planes of ones for the player, the holes and the goals."""
        del params
        player = jnp.zeros(state.board.shape, jnp.bool_).at[state.position[0], state.position[1]].set(True)
        return jnp.stack([player, state.board == HOLE, state.board == GOAL], axis=-1).astype(jnp.float32)

    def _draw_lake(
        self, key: PRNGKeyArray, frozen_probability: Float[Array, ""]
    ) -> tuple[Int8[Array, "size size"], Int32[Array, "2"]]:
        """Draw board and start until the goal can be reached: rejection, so exactly the conditioned law.

        Under vmap the loop's predicate is batched, which selects over this small carry alone; finished rows keep
        their lake while the others redraw.
        """
        if self.fixed_map is not None and not (self.random_start or self.random_goal):
            return self._draw_once(key, frozen_probability)[:2]

        def redraw(carry):
            attempt, *_ = carry
            return attempt + 1, *self._draw_once(jax.random.fold_in(key, attempt), frozen_probability)

        first = (jnp.ones((), jnp.int32), *self._draw_once(jax.random.fold_in(key, 0), frozen_probability))
        _, board, start, _ = jax.lax.while_loop(lambda carry: ~carry[-1], redraw, first)
        return board, start

    def _draw_once(
        self, key: PRNGKeyArray, frozen_probability: Float[Array, ""]
    ) -> tuple[Int8[Array, "size size"], Int32[Array, "2"], Bool[Array, ""]]:
        """One lake, solvable or not: board, start, and whether it may be played."""
        key_tiles, key_start, key_goal = jax.random.split(key, 3)
        start, goal = self._draw_ends(key_start, key_goal)
        if self.fixed_map is None:
            frozen = jax.random.uniform(key_tiles, (self.size**2,)) < frozen_probability
            tiles = jnp.where(frozen, FROZEN, HOLE).at[start].set(FROZEN).at[goal].set(GOAL)
            placeable = True
        else:
            tiles = jnp.asarray(_parse_map(self.fixed_map, keep_goals=not self.random_goal).ravel())
            placeable = tiles[start] == FROZEN
            if self.random_goal:
                placeable &= tiles[goal] == FROZEN
                tiles = tiles.at[goal].set(GOAL)
        board = tiles.reshape(self.size, self.size).astype(jnp.int8)
        position = jnp.stack(jnp.divmod(start, self.size)).astype(jnp.int32)
        return board, position, placeable & _can_reach_goal(board, position, self.solvable_within)

    def _draw_ends(self, key_start: PRNGKeyArray, key_goal: PRNGKeyArray) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
        """Flat indices of start and goal, distinct. The goal's is without meaning on a fixed map that keeps its own."""
        tiles = self.size**2
        start, goal = jnp.asarray(0, jnp.int32), jnp.asarray(tiles - 1, jnp.int32)
        if self.fixed_map is not None:
            start = jnp.asarray("".join(self.fixed_map).index("S"), jnp.int32)
        if self.random_goal:
            if self.random_start:
                start = jax.random.randint(key_start, (), 0, tiles)
            goal = (start + jax.random.randint(key_goal, (), 1, tiles)) % tiles
        elif self.random_start and self.fixed_map is None:
            start = jax.random.randint(key_start, (), 0, tiles - 1)
        elif self.random_start:
            start = jax.random.randint(key_start, (), 0, tiles)
        return start, goal

    def _check_solvable_within(self):
        """Refuse what no draw could meet, for redrawing would never end."""
        steps, ends_drawn = self.solvable_within, self.random_start or self.random_goal
        shortest = 1 if ends_drawn or self.fixed_map is not None else 2 * (self.size - 1)
        if steps is not None and steps < shortest:
            raise EnvironmentOptionError(
                f"solvable_within is {steps}: no path is shorter than {shortest} on this lake; give at least that"
            )
        if self.fixed_map is None:
            return
        # With a path from S to G, drawn ends that are one step apart exist: its first tiles, or its last.
        steps = None if ends_drawn else steps
        with jax.ensure_compile_time_eval():
            solvable = bool(_can_reach_goal(_parse_map(self.fixed_map), _start_of(self.fixed_map), steps))
        if not solvable:
            within = "" if steps is None else f" within {steps} steps"
            raise EnvironmentOptionError(f"fixed_map has no path from S to G{within}: give a map that has one")

    def _check_frozen_probability(self, frozen_probability: float, draws: int = 1024):
        """Refuse a probability at which redrawing would take for ever."""
        keys = jax.random.split(jax.random.key(0), draws)
        if not self._any_playable(keys, jnp.asarray(frozen_probability, jnp.float32)):
            limit = "" if self.solvable_within is None else " or solvable_within"
            raise EnvironmentOptionError(
                f"frozen_probability is {frozen_probability}: of {draws} maps of size {self.size} none was solvable; "
                f"raise it{limit}"
            )

    @functools.partial(jax.jit, static_argnums=0)
    def _any_playable(self, keys: Key[Array, " draws"], frozen_probability: Float[Array, ""]) -> Bool[Array, ""]:
        """Whether at least one of the lakes drawn from these keys may be played."""
        return jnp.any(jax.vmap(lambda key: self._draw_once(key, frozen_probability)[2])(keys))


@functools.partial(jax.jit, static_argnames="horizon")
def optimal_values(
    board: Int8[Array, "size size"], params: FrozenLakeParams, horizon: int
) -> Float32[Array, "steps size size"]:
    """Expected undiscounted return of optimal play, by value iteration over a finite horizon.

    `V[0] = 0`; `V[t](s) = max_a sum_s' P(s' | s, a) (r(s') + V[t-1](s'))`; 0 on holes and goals, which absorb.

    Args:
        board: the lake.
        params: success rate and rewards; with the default rewards a value is the probability of success.
        horizon: steps to look ahead, static.

    Returns:
        `[horizon + 1, size, size]`: entry `[t, row, column]` is the value with `t` steps left.
    """

    def back_up(values, _):
        values = _action_values(values, board, params).max(axis=0)
        return values, values

    none_left = jnp.zeros(board.shape, jnp.float32)
    _, values = jax.lax.scan(back_up, none_left, length=horizon)
    return jnp.concatenate([none_left[None], values])


def optimal_action(
    values: Float32[Array, "steps size size"], state: FrozenLakeState, params: FrozenLakeParams
) -> Int32[Array, ""]:
    """An action of optimal play in a state of the game that `values` was computed for.

    Of actions that are equally good, to 1e-6, it is the one that gains most with fewer steps left: who plays it does
    not dawdle while there is time.

    Args:
        values: `optimal_values(state.board, params, horizon)`, with the game's `max_steps` as horizon.
        state: where the game stands; `horizon - state.time` steps are left.
        params: as given to `optimal_values`.
    """
    horizon = values.shape[0] - 1
    after_this_step = jnp.maximum(horizon - state.time - 1, 0)
    row, column = state.position
    gains = jax.vmap(lambda v: _action_values(v, state.board, params)[:, row, column])(values)
    best = gains[after_this_step] >= gains[after_this_step].max() - 1e-6
    sooner = jnp.sum(gains, axis=0, where=(jnp.arange(horizon + 1) < after_this_step)[:, None])
    return jnp.where(best, sooner, -jnp.inf).argmax().astype(jnp.int32)


def _turn_probabilities(success_rate: Float[Array, ""]) -> Float[Array, "3"]:
    """Probability of each of `_TURNS`: the action before, the one meant, the one after, in the cycle of actions."""
    slip = (1 - success_rate) / 2
    return jnp.stack([slip, success_rate, slip])


def _outcome(
    board: Int8[Array, "size size"],
    position: Int32[Array, "2"],
    action: Int32[Array, ""],
    uniform: Float[Array, ""],
    params: FrozenLakeParams,
) -> tuple[Int32[Array, "2"], Float[Array, ""], Bool[Array, ""]]:
    """Where a number drawn uniformly from [0, 1) sends the player: position, reward and whether the game ends there."""
    thresholds = jnp.cumsum(_turn_probabilities(params.success_rate))[:-1]
    turn = jnp.asarray(_TURNS)[jnp.sum(uniform >= thresholds)]
    landed = jnp.clip(position + jnp.asarray(_MOVES)[(action + turn) % 4], 0, board.shape[0] - 1)
    tile = board[landed[0], landed[1]]
    return landed, _landing_reward(tile, params), tile != FROZEN


def _landing_reward(tiles: Int8[Array, "*shape"], params: FrozenLakeParams) -> Float[Array, "*shape"]:
    """Reward for landing on each tile. The schedule's order (goal, hole, frozen) is the tile codes' backwards."""
    return params.reward_schedule[GOAL - tiles.astype(jnp.int32)]


def _action_values(
    values: Float32[Array, "size size"], board: Int8[Array, "size size"], params: FrozenLakeParams
) -> Float32[Array, "4 size size"]:
    """Value of each action on each tile, when what follows is worth `values`; 0 on tiles that absorb."""
    landing = _landing_reward(board, params) + jnp.where(board == FROZEN, values, 0.0)
    tiles = np.moveaxis(np.indices(board.shape), 0, -1)
    targets = np.clip(tiles + _MOVES[:, None, None, :], 0, board.shape[0] - 1)
    by_direction = landing[targets[..., 0], targets[..., 1]]
    directions = (np.arange(4)[:, None] + _TURNS) % 4
    by_action = jnp.sum(
        _turn_probabilities(params.success_rate)[None, :, None, None] * by_direction[directions], axis=1
    )
    return jnp.where(board == FROZEN, by_action, 0.0)


@functools.partial(jax.jit, static_argnames="within")
def _can_reach_goal(board: Int8[Array, "size size"], start: Int32[Array, "2"], within: int | None) -> Bool[Array, ""]:
    """Whether some path of at most `within` steps (None: any number) leads from start to a goal around the holes.

    Flood fill, one step outwards a round, until nothing is added: exact. A shortest path visits no tile twice, so
    `size * size` rounds bound the loop.
    """
    passable = board != HOLE
    limit = board.size if within is None else within

    def grow(carry):
        reached, _, rounds = carry
        grown = (reached | _beside(reached)) & passable
        return grown, jnp.any(grown != reached), rounds + 1

    def growing(carry):
        reached, grew, rounds = carry
        return grew & (rounds < limit) & ~jnp.any(reached & (board == GOAL))

    seed = jnp.zeros(board.shape, jnp.bool_).at[start[0], start[1]].set(True)
    reached, *_ = jax.lax.while_loop(growing, grow, (seed, jnp.ones((), jnp.bool_), jnp.zeros((), jnp.int32)))
    return jnp.any(reached & (board == GOAL))


def _beside(tiles: Bool[Array, "size size"]) -> Bool[Array, "size size"]:
    """Tiles with a neighbour among `tiles`."""
    padded = jnp.pad(tiles, 1)
    return padded[:-2, 1:-1] | padded[2:, 1:-1] | padded[1:-1, :-2] | padded[1:-1, 2:]


def _checked_map(fixed_map: str | Sequence[str], size: int) -> tuple[str, ...]:
    """Rows of a map given by name or as rows, refused with the reason where it is none."""
    if isinstance(fixed_map, str):
        if fixed_map not in MAPS:
            names = ", ".join(f'"{name}"' for name in MAPS)
            raise EnvironmentOptionError(f'fixed_map is "{fixed_map}": name one of {names}, or give rows of letters')
        fixed_map = MAPS[fixed_map]
    rows = tuple(fixed_map)
    letters = "".join(rows)
    if unknown := sorted(set(letters) - set("SFHG")):
        raise EnvironmentOptionError(f"fixed_map has the letter {unknown[0]!r}: only S, F, H and G are tiles")
    if any(len(row) != len(rows) for row in rows):
        raise EnvironmentOptionError(f"fixed_map has rows of {[len(row) for row in rows]} tiles: it must be square")
    if size not in (0, len(rows)):
        raise EnvironmentOptionError(f"size is {size} but fixed_map has {len(rows)} rows: leave size out")
    if letters.count("S") != 1 or "G" not in letters:
        starts, goals = letters.count("S"), letters.count("G")
        raise EnvironmentOptionError(f"fixed_map has {starts} S and {goals} G: it needs one S and at least one G")
    return rows


def _parse_map(rows: Sequence[str], keep_goals: bool = True) -> Int8[np.ndarray, "size size"]:
    """Tile codes of a map's letters; the start, and goals that are not kept, are frozen."""
    codes = {"S": FROZEN, "F": FROZEN, "H": HOLE, "G": GOAL if keep_goals else FROZEN}
    return np.array([[codes[letter] for letter in row] for row in rows], np.int8)


def _start_of(rows: Sequence[str]) -> Int32[np.ndarray, "2"]:
    """(row, column) of the start."""
    return np.array(divmod("".join(rows).index("S"), len(rows)), np.int32)
