"""Snake: eat what is worth eating, and outlive the enemies.

All snakes move at once against the board as it was before the move. Bodies are kept as maps of the rounds until each
cell is left, so that a move is elementwise arithmetic with no scatter and no list to shift, whatever the batch.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Float32, Int, Int8, Int32, PRNGKeyArray

from envs_jax.environment import Environment, EnvironmentOptionError, EnvironmentState

UP, DOWN, LEFT, RIGHT = range(4)
NOTHING, APPLE, BANANA, FIRE = range(4)

# (x, y) change of each action, in the order of the actions; y counts upwards.
MOVES = np.array([(0, 1), (0, -1), (-1, 0), (1, 0)], np.int32)
# Quarter turns of a board that bring the edge that apples roll to into row 0.
_TURNS_TO_ROLL = {"down": 0, "right": 1, "up": 2, "left": 3}


@typing.no_type_check
class SnakeParams(struct.PyTreeNode):
    """Numbers of the game; `Snake.make_params` builds them checked.

    Attributes:
        apple_reward: for eating an apple.
        banana_reward: for eating a banana.
        fire_reward: for eating a fire.
        step_reward: for every step, the last one included.
        death_reward: on top of the -1 that dying gives.
    """

    apple_reward: Float[Array, "..."]
    banana_reward: Float[Array, "..."]
    fire_reward: Float[Array, "..."]
    step_reward: Float[Array, "..."]
    death_reward: Float[Array, "..."]

    @property
    def object_rewards(self) -> Float[Array, "... 4"]:
        """Reward for entering a cell, by what lies there: `NOTHING`, `APPLE`, `BANANA`, `FIRE`."""
        nothing = jnp.zeros_like(self.apple_reward)
        return jnp.stack([nothing, self.apple_reward, self.banana_reward, self.fire_reward], axis=-1)


@typing.no_type_check
class SnakeState(EnvironmentState):
    """A board with snakes; snake 0 is the player. Boards are indexed [y, x], row 0 at the bottom.

    Equal positions are equal states: nothing but `time` remembers how the game came here.

    Attributes:
        bodies: for each snake the number of its moves until it leaves a cell, 0 where it is not. The head's is
            the snake's length. Dead snakes leave the board.
        heads: (x, y) of each snake's head, (-1, -1) of dead ones.
        lengths: cells of each snake, with those it is about to grow; 0 of dead ones.
        objects: `NOTHING` (0), `APPLE` (1), `BANANA` (2) or `FIRE` (3) for each cell.
    """

    bodies: Int32[Array, "... snakes height width"]
    heads: Int32[Array, "... snakes 2"]
    lengths: Int32[Array, "... snakes"]
    objects: Int8[Array, "... height width"]

    @property
    def alive(self) -> Bool[Array, "... snakes"]:
        """Which snakes live."""
        return self.lengths > 0


@dataclasses.dataclass(frozen=True)
class Snake(Environment[SnakeState, SnakeParams]):
    """Snake with enemies. Actions: 0 up, 1 down, 2 left, 3 right. Cells are (x, y), (0, 0) at the bottom left.

    A round, in this order:

    1. All snakes move their heads at once. A snake dies on a wall, on a cell that any snake occupied before the move
       (its own tail included, though that is about to leave), and where two heads enter one cell. So two snakes that
       swap heads both die. Dead snakes leave the board, and eat nothing.
    2. A snake that entered an object eats it and grows by one: its tail stays. The player gets the object's reward.
    3. On a hill, apples roll one cell, from the lowest up, unless a body, a banana, an apple that stays or the edge
       blocks them. One that rolls onto a head is eaten; that snake's tail stays at its next move.
    4. Objects that are missing appear on free cells, uniformly; where no cell is free they stay away until one is.

    Enemies draw their moves uniformly from those that hit neither a wall nor their own body; its last cell does not
    count when longer than 2 and about to leave. They ignore all other snakes. Trapped ones draw from all four moves.

    The game ends when the player dies, when of two or more snakes at most one lives, and is truncated at `max_steps`.

    The observation is float32 `[height, width, 7]`, row 0 at the bottom: the player's head, its body (moves until each
    cell is left, as a share of the board's cells), the same two for the enemies, and ones for apples, bananas, fires.

    Attributes:
        width: cells in a row, at least 2.
        height: cells in a column, at least 2.
        enemies: number of snakes that play against the player, 0 or more.
        apples: number of apples on the board.
        bananas: number of bananas.
        fires: number of fires.
        initial_length: cells of every snake at the start; longer snakes lie in a random straight line.
        tail_is_safe: the last cell of a snake may be entered if the snake is longer than 2 and leaves the cell in the
            same move.
        hill: where apples roll to: "up", "down", "left", "right", or None for a flat board. New apples then
            appear at the opposite edge. Not with fires.
        destroy_at_bottom: apples that lie at the edge they roll to are removed in the next round, and new ones
            appear.
    """

    width: int = 10
    height: int = 10
    enemies: int = 1
    apples: int = 5
    bananas: int = 0
    fires: int = 0
    initial_length: int = 1
    tail_is_safe: bool = False
    hill: str | None = None
    destroy_at_bottom: bool = False

    def __post_init__(self):
        super().__post_init__()
        if min(self.width, self.height) < 2:
            raise EnvironmentOptionError(
                f"the board is {self.width} x {self.height}: give at least 2 for width and height"
            )
        for name in ("enemies", "apples", "bananas", "fires"):
            if getattr(self, name) < 0:
                raise EnvironmentOptionError(f"{name} is {getattr(self, name)}: it is a number of things, 0 or more")
        self._check_hill()
        self._check_room()

    @property
    def default_params(self) -> SnakeParams:
        """Apple 1, banana 10, fire -1, each step -0.01, death -1 and another -1."""
        return self.make_params()

    def make_params(
        self,
        *,
        apple_reward: ArrayLike = 1.0,
        banana_reward: ArrayLike = 10.0,
        fire_reward: ArrayLike = -1.0,
        step_reward: ArrayLike = -0.01,
        death_reward: ArrayLike = -1.0,
    ) -> SnakeParams:
        """Checked parameters from concrete numbers (or batches of them); see `SnakeParams`.

        Raises:
            EnvironmentOptionError: a reward is not a finite number.
        """
        numbers = {
            "apple_reward": apple_reward,
            "banana_reward": banana_reward,
            "fire_reward": fire_reward,
            "step_reward": step_reward,
            "death_reward": death_reward,
        }
        for name, number in numbers.items():
            if not np.all(np.isfinite(np.asarray(number))):
                raise EnvironmentOptionError(f"{name} is {number}: give a finite number")
        return SnakeParams(**{name: jnp.asarray(number, jnp.float32) for name, number in numbers.items()})

    @property
    def num_actions(self) -> int:
        """Four: up, down, left, right."""
        return 4

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """`(height, width, 7)`."""
        return (self.height, self.width, 7)

    @property
    def cells(self) -> int:
        """Number of cells of the board."""
        return self.width * self.height

    @property
    def snakes(self) -> int:
        """The player and the enemies."""
        return 1 + self.enemies

    @property
    def object_counts(self) -> dict[int, int]:
        """How many objects of each kind the board has, as far as there is room."""
        return {APPLE: self.apples, BANANA: self.bananas, FIRE: self.fires}

    def reset_env(self, key: PRNGKeyArray, params: SnakeParams) -> SnakeState:
        """Snakes in random straight lines, then objects, all on free cells: one uniform draw each."""
        del params
        uniforms = jax.random.uniform(key, (self.snakes + sum(self.object_counts.values()),))
        bodies, heads = self._place_snakes(uniforms[: self.snakes])
        objects = jnp.zeros((self.height, self.width), jnp.int8)
        everywhere = jnp.ones_like(objects, jnp.bool_)
        return SnakeState(
            bodies=bodies,
            heads=heads,
            lengths=jnp.full(self.snakes, self.initial_length, jnp.int32),
            objects=self._replenish(objects, bodies, uniforms[self.snakes :], apples_enter=everywhere),
            time=jnp.zeros((), jnp.int32),
            terminated=jnp.zeros((), jnp.bool_),
            truncated=jnp.zeros((), jnp.bool_),
        )

    def step_env(
        self, key: PRNGKeyArray, state: SnakeState, action: Int32[Array, ""], params: SnakeParams
    ) -> tuple[SnakeState, Float[Array, ""]]:
        """Play a round, with one uniform draw for each enemy and each object."""
        uniforms = jax.random.uniform(key, (self.enemies + sum(self.object_counts.values()),))
        return self._play_round(state, action, uniforms, params)

    def observe(self, state: SnakeState, params: SnakeParams) -> Float32[Array, "height width 7"]:
        """Planes for heads, bodies and objects; see the class."""
        del params
        heads = self._cells_at(state.heads)
        bodies = state.bodies.astype(jnp.float32) / self.cells
        objects = [state.objects == kind for kind in (APPLE, BANANA, FIRE)]
        planes = [heads[0], bodies[0], heads[1:].any(0), bodies[1:].sum(0), *objects]
        return jnp.stack([plane.astype(jnp.float32) for plane in planes], axis=-1)

    def moves(self, state: SnakeState) -> tuple[Bool[Array, "4 height width"], Bool[Array, "4"]]:
        """The cell that each of the player's moves enters (none beyond the wall), and which moves are safe.

        A move is safe if it avoids the walls and all that snakes occupy now. What the enemies are about to do is not
        known: two heads may still meet.
        """
        entered = self._cells_at(state.heads[0] + MOVES)
        obstacles = (state.bodies > 0).any(0)
        if self.tail_is_safe:
            obstacles &= ~_leaving_tails(state)[0]
        return entered, jnp.any(entered & ~obstacles, axis=(-2, -1))

    def _play_round(
        self,
        state: SnakeState,
        action: Int32[Array, ""],
        uniforms: Float[Array, " enemies_and_objects"],
        params: SnakeParams,
    ) -> tuple[SnakeState, Float[Array, ""]]:
        """The rules, as a function of numbers drawn uniformly from [0, 1)."""
        moves = jnp.append(action, self._enemy_moves(state, uniforms[: self.enemies]))
        heads = state.heads + jnp.asarray(MOVES)[moves]
        entered = self._cells_at(heads)
        entered, alive = self._survivors(state, entered)
        meals = jnp.max(jnp.where(entered, state.objects, NOTHING), axis=(-2, -1))
        objects = jnp.where(entered.any(0), jnp.int8(NOTHING), state.objects)
        bodies, lengths = _follow(state, entered, alive, ate=meals != NOTHING)
        apple_rolled_in = jnp.zeros_like(alive)
        if self.hill is not None:
            objects, apple_rolled_in = self._roll(objects, (bodies > 0).any(0), entered)
            bodies += (bodies > 0) & apple_rolled_in[:, None, None]
            lengths += apple_rolled_in
        reward = params.step_reward + params.object_rewards[meals[0]] + apple_rolled_in[0] * params.apple_reward
        after = state.replace(
            bodies=bodies,
            heads=jnp.where(alive[:, None], heads, -1),
            lengths=lengths,
            objects=self._replenish(objects, bodies, uniforms[self.enemies :], apples_enter=self._uphill_edge()),
            terminated=~alive[0] | ((self.enemies > 0) & (alive.sum() <= 1)),
        )
        return after, reward + jnp.where(alive[0], 0.0, params.death_reward - 1)

    def _enemy_moves(self, state: SnakeState, uniforms: Float[Array, " enemies"]) -> Int32[Array, " enemies"]:
        """A move of each enemy, from one uniform number each."""
        entered = self._cells_at(state.heads[1:, None] + MOVES)
        obstacles = ((state.bodies > 0) & ~_leaving_tails(state))[1:]
        allowed = jnp.any(entered & ~obstacles[:, None], axis=(-2, -1))
        return choose(allowed | ~allowed.any(-1, keepdims=True), uniforms)

    def _survivors(
        self, state: SnakeState, entered: Bool[Array, "snakes height width"]
    ) -> tuple[Bool[Array, "snakes height width"], Bool[Array, " snakes"]]:
        """Which snakes survive entering those cells, and the cells of those alone."""
        obstacles = state.bodies > 0
        if self.tail_is_safe:
            eating = jnp.any(entered & (state.objects != NOTHING), axis=(-2, -1))
            obstacles &= ~(_leaving_tails(state) & ~eating[:, None, None])
        deadly = obstacles.any(0) | (entered.sum(0) > 1)
        entered &= ~deadly
        return entered, entered.any((-2, -1))

    def _roll(
        self,
        objects: Int8[Array, "height width"],
        occupied: Bool[Array, "height width"],
        heads: Bool[Array, "snakes height width"],
    ) -> tuple[Int8[Array, "height width"], Bool[Array, " snakes"]]:
        """Objects after apples rolled one cell, and which snakes got one on their head (at most one each)."""
        assert self.hill is not None
        turn = functools.partial(jnp.rot90, k=_TURNS_TO_ROLL[self.hill], axes=(-2, -1))
        turned, heads = turn(objects), turn(heads)
        blocked = (turn(occupied) & ~heads.any(0)) | ((turned != NOTHING) & (turned != APPLE))
        apples = turned == APPLE
        # From the lowest row up: an apple stays on what blocks it and on an apple that stays.
        stays = [jnp.zeros_like(apples[0]) if self.destroy_at_bottom else apples[0]]
        for row in range(1, len(apples)):
            stays.append(apples[row] & (blocked[row - 1] | stays[row - 1]))
        staying = jnp.stack(stays)
        landed = jnp.roll(apples & ~staying, -1, axis=0).at[-1].set(False)
        eaten = landed & heads
        left = jnp.where(apples & ~staying, jnp.int8(NOTHING), turned)
        rolled = jnp.where(landed & ~eaten.any(0), jnp.int8(APPLE), left)
        return jnp.rot90(rolled, k=-_TURNS_TO_ROLL[self.hill]), eaten.any((-2, -1))

    def _replenish(
        self,
        objects: Int8[Array, "height width"],
        bodies: Int32[Array, "snakes height width"],
        uniforms: Float[Array, " objects"],
        apples_enter: Bool[Array, "height width"],
    ) -> Int8[Array, "height width"]:
        """Objects with the missing ones put on free cells."""
        free = (objects == NOTHING) & ~(bodies > 0).any(0)
        used = 0
        for kind, count in self.object_counts.items():
            if count == 0:
                continue
            missing = count - jnp.sum(objects == kind)
            allowed = free & apples_enter if kind == APPLE else free
            drawn = _draw_cells(allowed.ravel(), uniforms[used : used + count], missing).reshape(objects.shape)
            objects = jnp.where(drawn, jnp.int8(kind), objects)
            free &= ~drawn
            used += count
        return objects

    def _place_snakes(
        self, uniforms: Float[Array, " snakes"]
    ) -> tuple[Int32[Array, "snakes height width"], Int32[Array, "snakes 2"]]:
        """Bodies and heads of snakes at the start, from one uniform number each."""
        lines = jnp.asarray(_straight_lines(self.width, self.height, self.initial_length))
        ages = self.initial_length - jnp.arange(self.initial_length, dtype=jnp.int32)
        taken = jnp.zeros(self.cells, jnp.bool_)
        bodies, heads = [], []
        for i in range(self.snakes):
            line = lines[choose(~taken[lines].any(-1), uniforms[i])]
            body = jnp.zeros(self.cells, jnp.int32).at[line].set(ages)
            taken |= body > 0
            bodies.append(body.reshape(self.height, self.width))
            heads.append(jnp.stack([line[0] % self.width, line[0] // self.width]))
        return jnp.stack(bodies), jnp.stack(heads)

    def _cells_at(self, places: Int32[Array, "*batch 2"]) -> Bool[Array, "*batch height width"]:
        """Boards with the one cell (x, y) set, or none where it is outside."""
        x, y = places[..., 0], places[..., 1]
        column = x[..., None] == np.arange(self.width)
        row = y[..., None] == np.arange(self.height)
        return row[..., :, None] & column[..., None, :]

    def _uphill_edge(self) -> Bool[Array, "height width"]:
        """Cells where new apples appear: all, or the edge they roll away from."""
        if self.hill is None:
            return jnp.ones((self.height, self.width), jnp.bool_)
        y, x = np.indices((self.height, self.width))
        edges = {"up": y == 0, "down": y == self.height - 1, "left": x == self.width - 1, "right": x == 0}
        return jnp.asarray(edges[self.hill])

    def _check_hill(self):
        if self.hill is not None and self.hill not in _TURNS_TO_ROLL:
            raise EnvironmentOptionError(f"hill is {self.hill!r}: apples roll up, down, left or right, or give None")
        if self.hill is not None and self.fires:
            raise EnvironmentOptionError(f"hill is {self.hill!r} with fires {self.fires}: a hill has no fires")
        if self.hill is None and self.destroy_at_bottom:
            raise EnvironmentOptionError("destroy_at_bottom is True without a hill: name one, or leave it out")

    def _check_room(self):
        """Refuse what may find no place at the start, whatever is drawn."""
        length, objects = self.initial_length, sum(self.object_counts.values())
        if length < 1:
            raise EnvironmentOptionError(f"initial_length is {length}: a snake has at least 1 cell")
        if self.snakes * length + objects > self.cells:
            raise EnvironmentOptionError(
                f"{self.snakes} snakes of {length} and {objects} objects need more than the {self.cells} cells of the"
                " board: make it larger"
            )
        # A snake that lies across covers at most `length` rows (or columns): one more is a row free from end to end.
        rows_free = self.width >= length and self.height > self.enemies * length
        columns_free = self.height >= length and self.width > self.enemies * length
        if length > 1 and not (rows_free or columns_free):
            raise EnvironmentOptionError(
                f"initial_length is {length}: with {self.enemies} enemies, straight snakes may not all fit on"
                f" {self.width} x {self.height} cells; make the board larger or the snakes shorter"
            )


def choose(allowed: Bool[Array, "*batch choices"], uniform: Float[Array, "*batch"]) -> Int32[Array, "*batch"]:
    """A uniformly drawn one of the allowed choices, through a running count.

    Args:
        allowed: which choices may be drawn; at least one, otherwise the result is past the end.
        uniform: a number drawn uniformly from [0, 1).
    """
    # For u a float32 below 1, u * n rounds to a number below n.
    running = jnp.cumsum(allowed, axis=-1, dtype=jnp.int32)
    rank = jnp.floor(uniform * running[..., -1]).astype(jnp.int32)
    return jnp.sum(running <= rank[..., None], axis=-1, dtype=jnp.int32)


def _draw_cells(
    free: Bool[Array, " cells"], uniforms: Float[Array, " most"], wanted: Int[Array, ""]
) -> Bool[Array, " cells"]:
    """`wanted` distinct free cells (all, where there are fewer), uniformly, through one running count.

    The i-th cell is the one of rank `floor(uniforms[i] * left)` among the `left` free cells that are not drawn yet.
    """
    most = uniforms.shape[0]
    running = jnp.cumsum(free, dtype=jnp.int32)
    index = jnp.arange(most, dtype=jnp.int32)
    left = running[-1] - index
    ranks = jnp.floor(uniforms * left).astype(jnp.int32)

    def draw(drawn: Int32[Array, " most"], i_and_rank: tuple[Int32[Array, ""], Int32[Array, ""]]):
        # `drawn` is sorted; drawn[j] - j is the number of cells below it that are not drawn.
        i, rank = i_and_rank
        rank += jnp.sum((drawn - index <= rank) & (index < i), dtype=jnp.int32)
        below = jnp.sum((drawn < rank) & (index < i), dtype=jnp.int32)
        shifted = jnp.where(index > below, jnp.roll(drawn, 1), drawn)
        return jnp.where(index == below, rank, shifted), rank

    _, ranks = jax.lax.scan(draw, jnp.zeros(most, jnp.int32), (index, ranks))
    hits = (running - 1 == ranks[:, None]) & ((index < wanted) & (left > 0))[:, None]
    return free & hits.any(0)


def _follow(
    state: SnakeState, entered: Bool[Array, "snakes height width"], alive: Bool[Array, " snakes"], ate: Array
) -> tuple[Int32[Array, "snakes height width"], Int32[Array, " snakes"]]:
    """Bodies and lengths after the heads entered those cells: tails leave, or stay where the snake ate."""
    lengths = jnp.where(alive, state.lengths + ate, 0)
    remaining = jnp.maximum(state.bodies - jnp.where(ate, 0, 1)[:, None, None], 0)
    bodies = jnp.where(entered, lengths[:, None, None], remaining)
    return jnp.where(alive[:, None, None], bodies, 0), lengths


def _leaving_tails(state: SnakeState) -> Bool[Array, "snakes height width"]:
    """Last cells of snakes longer than 2, where the next move leaves them unless the snake eats."""
    return (state.bodies == 1) & (state.lengths > 2)[:, None, None]


@functools.cache
def _straight_lines(width: int, height: int, length: int) -> np.ndarray:
    """Flat indices `[lines, length]` of all straight runs of cells on the board, head first."""
    y, x = (indices.ravel() for indices in np.indices((height, width)))
    runs = []
    for dx, dy in MOVES[: 1 if length == 1 else 4]:
        xs = x[:, None] + dx * np.arange(length)
        ys = y[:, None] + dy * np.arange(length)
        inside = ((xs >= 0) & (xs < width) & (ys >= 0) & (ys < height)).all(-1)
        runs.append((ys * width + xs)[inside])
    return np.concatenate(runs).astype(np.int32)
