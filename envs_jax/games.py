"""Games as language agents play them: an environment, its text, its action words; and the named scenarios."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from envs_jax.environment import Environment, EnvironmentState
from envs_jax.frozen_lake import GOAL, FrozenLake
from envs_jax.players import positions
from envs_jax.snake import APPLE, BANANA, FIRE, NOTHING, Snake, SnakeParams, SnakeState
from envs_jax.text.grammar import Constraint, Reader, ReplyMode
from envs_jax.text.renderer import Renderer, compile_template
from envs_jax.text.template import Slot, Template
from envs_jax.text.tokenizer import Shot, TextTokenizer, chat_messages

Style = Literal["full", "short"]
"""`"full"` explains the game; `"short"` is the bare position, for small models that are trained from nothing."""


class GameError(ValueError):
    """An unknown game, or options that it does not allow."""


@dataclasses.dataclass(frozen=True, eq=False)
class TextGame:
    """A text-mediated game: what the agent reads, and what its words do.

    Attributes:
      name: of the scenario.
      environment: the game's rules.
      params: the environment's parameters.
      system: the system message: role, rules, actions, form of the reply.
      template: the observation, which is the user message.
      slot_values: `(state, params) -> values` of the template's slots, pure and jittable.
      won: `(state, params) -> bool` of a finished game, pure and jittable: what success rates count.
      actions: action words; the index is the environment's action.
      reply: the form of the reply: the action alone, or thoughts and a plan before it.
      shaping: fields of `params` that help training alone; results are reported without them (see `scored`).
      shots: example turns that stand in every prompt before the observation.
    """

    name: str
    environment: Environment
    params: Any
    system: str
    template: Template
    slot_values: Callable[[Any, Any], Int[Array, " slots"]]
    won: Callable[[Any, Any], Bool[Array, ""]]
    actions: tuple[str, ...]
    reply: ReplyMode
    shaping: tuple[str, ...] = ()
    shots: tuple[Shot, ...] = ()

    def __post_init__(self):
        if len(self.actions) != self.environment.num_actions:
            raise GameError(f"{len(self.actions)} action words for {self.environment.num_actions} actions; name each")

    @functools.cached_property
    def scored(self) -> "TextGame":
        """The game as it is evaluated: the same, with the rewards named in `shaping` set to 0."""
        if not self.shaping:
            return self
        zeros = {name: jnp.zeros_like(getattr(self.params, name)) for name in self.shaping}
        return dataclasses.replace(self, params=dataclasses.replace(self.params, **zeros), shaping=())

    def text(self, state: EnvironmentState) -> str:
        """The observation of one (unbatched) state, on the host."""
        values = self.slot_values(jax.tree.map(jnp.asarray, state), self.params)
        return self.template.text(np.asarray(values).tolist())

    def messages(self, state: EnvironmentState) -> list[dict[str, str]]:
        """The chat of one step: system message, example turns and observation."""
        return chat_messages(self.system, self.text(state), self.shots)

    def with_shots(self, count: int) -> "TextGame":
        """The same game with example turns in its prompt, for models that learn the form of a reply by example.

        They show every action word in turn, each in a position of a fixed seed in which the strongest player known for
        the game (`players_of`) chooses it. They belong to the shared prefix, so that their cost does not grow with the
        steps that are played.

        Raises:
          GameError: an action is not the player's choice in any of the positions looked at.
        """
        if count == 0:
            return dataclasses.replace(self, shots=())
        states, chosen = jax.device_get(positions(self.environment, jax.random.key(0), self.params))
        shots = []
        for number in range(count):
            words = self.actions[number % len(self.actions) :]
            found = np.flatnonzero(chosen == number % len(self.actions))
            if not found.size:
                raise GameError(f"{self.name}: no position found in which {words[0]!r} is a good move; give shots 0")
            # From all over the game: positions are in the order of their steps.
            index = found[(number + 1) * found.size // (count + 1)]
            shots.append((self.text(jax.tree.map(lambda x, i=index: x[i], states)), _reply_form(words, self.reply)))
        return dataclasses.replace(self, shots=tuple(shots))


@dataclasses.dataclass(frozen=True, eq=False)
class TokenizedGame:
    """A game made ready for one tokenizer; made by `tokenize_game`.

    Attributes:
      game: the game.
      tokenizer: the tokenizer.
      renderer: state to token ids, exact.
      reader: reply tokens to the action.
      constraint: the tokens that can still end in a readable reply; None where replies are free.
      reply_limit: most tokens of a reply.
    """

    game: TextGame
    tokenizer: TextTokenizer
    renderer: Renderer
    reader: Reader
    constraint: Constraint | None
    reply_limit: int

    @functools.cached_property
    def scored(self) -> "TokenizedGame":
        """The game as it is evaluated: see `TextGame.scored`. Its text is the same."""
        return self if self.game.scored is self.game else dataclasses.replace(self, game=self.game.scored)

    @property
    def prefix_ids(self) -> Int[np.ndarray, " prefix"]:
        """Tokens that begin the prompt of every step of every episode."""
        return self.renderer.prefix_ids

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply, a set."""
        return self.tokenizer.eos_ids

    @property
    def max_tokens(self) -> int:
        """Length of a padded observation."""
        return self.renderer.max_tokens

    def observation(self, state: EnvironmentState) -> tuple[Int[Array, " tokens"], Int[Array, ""]]:
        """Left-padded ids of one state's observation up to the reply, and their number. Pure; batch with `vmap`."""
        return self.renderer(self.game.slot_values(state, self.game.params))

    def full_text(self, state: EnvironmentState) -> str:
        """The whole prompt of one state, as the model sees it."""
        return self.tokenizer.apply_chat_template(self.game.messages(state))


def tokenize_game(game: TextGame, tokenizer: TextTokenizer, *, reply_limit: int, constrain: bool) -> TokenizedGame:
    """Compile a game's text and replies for a tokenizer.

    Args:
      game: the game.
      tokenizer: the model's.
      reply_limit: most tokens of a reply, at least 1.
      constrain: allow only tokens that can still end in a readable reply.

    Raises:
      GameError: the reply limit is below 1.
      RenderError: the observation cannot be rendered exactly with this tokenizer; names the slot.
      TokenizerError: the chat template alters messages.
    """
    if reply_limit < 1:
        raise GameError(f"reply limit {reply_limit} leaves no room for a reply; give at least 1 token")
    before, after = tokenizer.chat_frame(game.system, game.template.examples(), game.shots)
    return TokenizedGame(
        game=game,
        tokenizer=tokenizer,
        renderer=compile_template(game.template, tokenizer, before=before, after=after),
        reader=_reader(game.actions, tokenizer),
        constraint=Constraint.compile(game.actions, tokenizer, reply=game.reply) if constrain else None,
        reply_limit=reply_limit,
    )


@functools.cache
def _reader(actions: tuple[str, ...], tokenizer: TextTokenizer) -> Reader:
    """One reader for all scenarios of a tokenizer."""
    return Reader.compile(actions, tokenizer)


def make_game(name: str, *, style: str = "full", reply: str = "action", shots: int = 0, **options: Any) -> TextGame:
    """The named scenario.

    Args:
      name: one of `GAMES`.
      style: how much the text says: a `Style`.
      reply: the form of the reply: a `ReplyMode`.
      shots: example turns in the prompt, see `TextGame.with_shots`.
      **options: of the scenario's game, such as `max_steps`, in place of the scenario's own.

    Raises:
      GameError: no such scenario, style or form of reply.
    """
    if name not in GAMES:
        near = difflib.get_close_matches(name, GAMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise GameError(f"unknown game {name!r}; {hint}allowed: {', '.join(GAMES)}")
    _check_choice("style", style, get_args(Style))
    _check_choice("reply", reply, get_args(ReplyMode))
    return GAMES[name](name=name, style=style, reply=reply, **options).with_shots(shots)


LAKE_ACTIONS = ("left", "down", "right", "up")
_LAKE_CELLS = (" F", " H", " G", " P")  # indexed by the board's tile codes, and the player after them
_PLAYER_CELL = 3


def frozen_lake_game(
    *,
    name: str = "frozen-lake",
    style: Style = "full",
    reply: ReplyMode = "action",
    success_rate: float = 1 / 3,
    reward_schedule: Sequence[float] = (1.0, 0.0, 0.0),
    frozen_probability: float = 0.8,
    **options: Any,
) -> TextGame:
    """Frozen Lake in words.

    Args:
      name: of the scenario.
      style: how much the text says.
      reply: the form of the reply.
      success_rate: probability that a move goes where it should.
      reward_schedule: rewards of landing on goal, hole and frozen tile.
      frozen_probability: of the tiles of random maps.
      **options: of `FrozenLake`: `size`, `fixed_map`, `random_start`, `random_goal`, `solvable_within`, `max_steps`.
    """
    lake = FrozenLake(**options)
    params = lake.make_params(
        success_rate=success_rate, reward_schedule=reward_schedule, frozen_probability=frozen_probability
    )
    goals = _count_goals(lake)
    full = style == "full"
    return TextGame(
        name=name,
        environment=lake,
        params=params,
        system=_lake_system(lake, success_rate, reply)
        if full
        else f"Reach G, avoid H. {_reply_form(LAKE_ACTIONS, reply)}",
        template=_lake_template(lake.size, goals) if full else Template(_lake_grid(lake.size)),
        slot_values=functools.partial(_lake_values, goals=goals if full else None),
        won=_lake_won,
        actions=LAKE_ACTIONS,
        reply=reply,
    )


SNAKE_ACTIONS = ("up", "down", "left", "right")
_NEAR_CELLS = {NOTHING: " _", APPLE: " A", BANANA: " B", FIRE: " F"}  # indexed by the board's object codes
_HEAD, _BODY, _ENEMY_HEAD, _ENEMY_BODY = range(len(_NEAR_CELLS), len(_NEAR_CELLS) + 4)
_SNAKE_CELLS = (*_NEAR_CELLS.values(), " P", " p", " E", " e")
_BLOCKED = len(_NEAR_CELLS)
_WAYS = ((" _", " left", " right"), (" _", " up", " down"))
_OBJECT_WORDS = {APPLE: ("apple", "Apples"), BANANA: ("banana", "Bananas"), FIRE: ("fire", "Fires")}


def snake_game(
    *,
    name: str = "snake",
    style: Style = "full",
    reply: ReplyMode = "action",
    grid: bool = True,
    apple_reward: float = 1.0,
    banana_reward: float = 10.0,
    fire_reward: float = -1.0,
    step_reward: float = -0.01,
    death_reward: float = -1.0,
    **options: Any,
) -> TextGame:
    """Snake in words.

    The full text lists heads and objects by coordinates and draws the board; without the grid it lists the bodies
    too. The short one is of fixed length and about 20 tokens: coordinates of the heads and objects, what lies next to
    the head in the order of the actions (`x` for what kills), and the way to the nearest object worth eating. Of the
    bodies it shows what is next to the head alone.

    Args:
      name: of the scenario.
      style: how much the text says.
      reply: the form of the reply.
      grid: draw the board (full style only).
      apple_reward: for an apple.
      banana_reward: for a banana.
      fire_reward: for a fire.
      step_reward: for every step, in training only: `TextGame.scored` has none.
      death_reward: for dying, beyond -1.
      **options: of `Snake`: `width`, `height`, `enemies`, `apples`, `bananas`, `fires`, `initial_length`,
        `tail_is_safe`, `hill`, `destroy_at_bottom`, `max_steps`.

    Raises:
      GameError: no grid was asked for in the short style, which has none.
    """
    if style == "short" and not grid:
        raise GameError("grid False is for the full style: the short one has no grid; leave grid out")
    snake = Snake(**options)
    params = snake.make_params(
        apple_reward=apple_reward,
        banana_reward=banana_reward,
        fire_reward=fire_reward,
        step_reward=step_reward,
        death_reward=death_reward,
    )
    if style == "full":
        system, template = _snake_system(snake, params, reply), _snake_template(snake, grid)
        slot_values = functools.partial(_snake_values, snake=snake, grid=grid)
    else:
        system, template = _short_snake_system(snake, params, reply), _short_snake_template(snake)
        slot_values = functools.partial(_short_snake_values, snake=snake)
    return TextGame(
        name=name,
        environment=snake,
        params=params,
        system=system,
        template=template,
        slot_values=slot_values,
        won=functools.partial(_snake_won, snake=snake),
        actions=SNAKE_ACTIONS,
        reply=reply,
        shaping=("step_reward",),
    )


GAMES: Mapping[str, Callable[..., TextGame]] = {
    "frozen-lake": functools.partial(frozen_lake_game, size=4, frozen_probability=0.8, success_rate=1.0, max_steps=8),
    "frozen-lake-slippery": functools.partial(frozen_lake_game, size=4, frozen_probability=0.9, max_steps=15),
    "frozen-lake-big-slippery": functools.partial(frozen_lake_game, size=6, frozen_probability=0.9, max_steps=15),
    "frozen-lake-ragen": functools.partial(
        frozen_lake_game, size=4, frozen_probability=0.8, random_start=True, random_goal=True, max_steps=10
    ),
    "snake-8": functools.partial(snake_game, max_steps=8),
    "snake-20": functools.partial(snake_game, max_steps=20),
    "snake-20-poison": functools.partial(snake_game, apple_reward=-1.0, max_steps=20),
    "snake-20-poison-banana": functools.partial(
        snake_game, apples=3, apple_reward=-1.0, bananas=3, banana_reward=1.0, max_steps=20
    ),
    "snake-20-downhill": functools.partial(snake_game, hill="down", max_steps=20),
}
"""Scenarios by name; each makes its game from `name`, `style`, `reply` and the game's own options."""


def _check_choice(option: str, given: str, allowed: Sequence[str]) -> None:
    if given not in allowed:
        raise GameError(f"{option} {given!r} is unknown; allowed: {', '.join(allowed)}")


def _reply_form(actions: Sequence[str], reply: ReplyMode) -> str:
    action = f"<action>{actions[0]}</action>"
    return action if reply == "action" else f"<think>your thoughts</think><plan>your plan</plan>{action}"


def _lake_system(lake: FrozenLake, success_rate: float, reply: ReplyMode) -> str:
    if success_rate == 1:
        ice = "The ice holds your feet: a move always goes where you want."
    else:
        ice = (
            f"The ice is slippery: a move goes where you want with probability {success_rate:.2g}; otherwise you slide"
            " to one of the two sides, each as likely as the other, and never backwards."
        )
    return (
        "You cross a frozen lake. Reach the goal without falling into a hole.\n"
        "Rules:\n"
        "- Each turn you move one tile: left, down, right or up. At the edge of the lake you stay where you are.\n"
        f"- {ice}\n"
        f"- The game ends when you reach the goal (won), fall into a hole (lost) or have made {lake.max_steps} moves"
        " (lost).\n"
        f"Actions: {', '.join(LAKE_ACTIONS)}.\n"
        f"Answer with one action in exactly this form and nothing after it: {_reply_form(LAKE_ACTIONS, reply)}"
    )


def _lake_template(size: int, goals: int) -> Template:
    """Static text first, so that it belongs to the shared prefix."""
    numbers = tuple(str(i) for i in range(size))
    legend = (
        f"The lake has {size} rows and {size} columns. A place is written (row, column), with (0, 0) at the top left:"
        " rows are counted downwards, columns to the right.\n"
        "In the grid P is you, F is ice, H is a hole and G is the goal.\n"
    )
    here = ("You are at (", Slot("player row", numbers), ", ", Slot("player column", numbers), ").")
    there: list[str | Slot] = []
    for i in range(goals):
        row, column = Slot(f"goal {i} row", numbers), Slot(f"goal {i} column", numbers)
        there += [" The goal is at (" if i == 0 else " Another goal is at (", row, ", ", column, ")."]
    return Template((legend, *here, *there, "\n", *_lake_grid(size)))


def _lake_grid(size: int) -> tuple[str | Slot, ...]:
    parts: list[str | Slot] = []
    for row in range(size):
        parts += ["\n"] if row else []
        parts += [Slot(f"cell ({row}, {column})", _LAKE_CELLS) for column in range(size)]
    return tuple(parts)


def _count_goals(lake: FrozenLake) -> int:
    if lake.fixed_map is None or lake.random_goal:
        return 1
    return "".join(lake.fixed_map).count("G")


def _lake_won(state: Any, params: Any) -> Bool[Array, ""]:
    """Whether the player stands on a goal."""
    del params
    return state.board[state.position[0], state.position[1]] == GOAL


def _lake_values(state: Any, params: Any, *, goals: int | None) -> Int[Array, " slots"]:
    """Slot values of the lake's template; `goals` is None for the grid alone."""
    del params
    row, column = state.position
    cells = state.board.astype(jnp.int32).at[row, column].set(_PLAYER_CELL).ravel()
    if goals is None:
        return cells
    goal_rows, goal_columns = jnp.nonzero(state.board == GOAL, size=goals)
    places = jnp.stack([goal_rows, goal_columns], axis=-1).ravel().astype(jnp.int32)
    return jnp.concatenate([state.position.astype(jnp.int32), places, cells])


def _snake_system(snake: Snake, params: SnakeParams, reply: ReplyMode) -> str:
    tail = "except a tail that moves away" if snake.tail_is_safe else "its own tail included"
    others = ", when no other snake is left" if snake.enemies else ""
    return (
        "You play Snake. Collect as much reward as you can.\n"
        "Rules:\n"
        "- Each turn all snakes move their heads one cell at once: up, down, left or right. The bodies follow.\n"
        f"- A snake dies if its head hits a wall or any cell of a snake ({tail}), or if two heads enter one cell.\n"
        f"{_meal_rules(snake, params)}"
        f"{_hill_rule(snake)}"
        f"- Dying gives {float(params.death_reward) - 1:+g}.\n"
        f"- The game ends when you die{others}, or after {snake.max_steps} turns.\n"
        f"Actions: {', '.join(SNAKE_ACTIONS)}.\n"
        "Answer with one action in exactly this form and nothing after it:"
        f" {_reply_form(SNAKE_ACTIONS, reply)}"
    )


def _meal_rules(snake: Snake, params: SnakeParams) -> str:
    rewards = np.asarray(params.object_rewards).tolist()
    meals = [f"{_OBJECT_WORDS[kind][0]} {rewards[kind]:+g}" for kind in _kinds(snake)]
    if not meals:
        return ""
    return f"- Eating gives: {', '.join(meals)}. It makes you one cell longer, and a new one appears.\n"


def _hill_rule(snake: Snake) -> str:
    if snake.hill is None:
        return ""
    end = "the edge, where they vanish" if snake.destroy_at_bottom else "something is in the way"
    return (
        f"- The board is a hill: each turn apples roll one cell {snake.hill}, until {end}. New ones appear at the other"
        " edge.\n"
    )


def _short_snake_system(snake: Snake, params: SnakeParams, reply: ReplyMode) -> str:
    rewards = np.asarray(params.object_rewards)
    meals = "".join(_NEAR_CELLS[kind] for kind in _kinds(snake) if rewards[kind] > 0)
    poison = "".join(_NEAR_CELLS[kind] for kind in _kinds(snake) if rewards[kind] < 0)
    aim = f"Eat{meals}, avoid" if meals else "Avoid"
    return f"{aim} x{poison}. {_reply_form(SNAKE_ACTIONS, reply)}"


def _kinds(snake: Snake) -> list[int]:
    """Kinds of object that the board has."""
    return [kind for kind, count in snake.object_counts.items() if count]


def _snake_template(snake: Snake, grid: bool) -> Template:
    """Static text first, so that it belongs to the shared prefix."""
    legend = (
        f"The board is {snake.width} cells wide and {snake.height} cells high. A cell is written (x, y), with (0, 0) at"
        " the bottom left: x is counted to the right, y upwards.\n"
    )
    lists = _place_list(snake, "Your head", 1)
    if snake.enemies:
        lists += _place_list(snake, "Enemy heads", snake.enemies)
    for kind in _kinds(snake):
        lists += _place_list(snake, _OBJECT_WORDS[kind][1], snake.object_counts[kind])
    if not grid:
        bodies = ("Your body", *(f"Body of enemy {i}" for i in range(1, snake.snakes)))
        lists += [part for of in bodies for part in _place_list(snake, f"{of} behind the head", _most_behind(snake))]
        return Template((legend, *lists[:-1], " ]"))
    letters = ["P is your head", "p your body"]
    letters += ["E the head of an enemy", "e its body"] if snake.enemies else []
    letters += [f"{_OBJECT_WORDS[kind][0][0].upper()} {_article(_OBJECT_WORDS[kind][0])}" for kind in _kinds(snake)]
    legend += f"In the grid {', '.join(letters)}; _ is an empty cell. The bottom row is y = 0.\n"
    return Template((legend, *lists, *_snake_grid(snake)))


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _place_list(snake: Snake, title: str, count: int) -> list[str | Slot]:
    """A line with up to `count` places; spaces before the brackets make it safe to cut there."""
    places = tuple(f" ({c % snake.width}, {c // snake.width})" for c in range(snake.cells))
    items = [Slot(f"{title} {i}", ("", *places)) for i in range(count)]
    return [f"{title}: [", *items, " ]\n"]


def _snake_grid(snake: Snake) -> list[str | Slot]:
    parts: list[str | Slot] = []
    for y in reversed(range(snake.height)):
        parts += [Slot(f"cell ({x}, {y})", _SNAKE_CELLS) for x in range(snake.width)]
        parts += ["\n"] if y else []
    return parts


def _short_snake_template(snake: Snake) -> Template:
    digits = len(str(max(snake.width, snake.height) - 1))
    places = tuple(f"{c % snake.width:0{digits}}{c // snake.width:0{digits}}" for c in range(snake.cells))
    alternatives = (" _" * 2 * digits, *places)
    count = snake.snakes + sum(snake.object_counts.values())
    near = [Slot(f"cell {action}", (*_NEAR_CELLS.values(), " x")) for action in SNAKE_ACTIONS]
    ways = [Slot(f"way {i}", words) for i, words in enumerate(_WAYS)]
    return Template((*(Slot(f"place {i}", alternatives) for i in range(count)), *near, *ways))


def _most_behind(snake: Snake) -> int:
    """Most cells that a snake can have behind its head before the game is over."""
    return min(snake.initial_length + snake.max_steps, snake.cells) - 1


def _snake_won(state: SnakeState, params: SnakeParams, *, snake: Snake) -> Bool[Array, ""]:
    """Whether the player lives at the end, either alone of several snakes, or at the time limit and well fed.

    Well fed is to have eaten something, or nothing if no object on the board is worth eating.
    """
    worth_eating = jnp.any(params.object_rewards[np.array([NOTHING, *_kinds(snake)])] > 0)
    has_eaten = state.lengths[0] > snake.initial_length
    return state.alive[0] & (state.terminated | (state.truncated & (has_eaten == worth_eating)))


def _snake_values(state: SnakeState, params: SnakeParams, *, snake: Snake, grid: bool) -> Int[Array, " slots"]:
    """Slot values of the full template."""
    del params
    lists = [_head_places(state, snake), *_object_places(state, snake)]
    if grid:
        cells = jnp.where((state.bodies > 0).any(0), _ENEMY_BODY, state.objects.astype(jnp.int32))
        cells = jnp.where(_at_heads(state).any(0), _ENEMY_HEAD, cells)
        cells = jnp.where(state.bodies[0] > 0, jnp.where(_at_heads(state)[0], _HEAD, _BODY), cells)
        return jnp.concatenate([*lists, cells[::-1].ravel()])
    age = state.lengths[:, None] - 1 - np.arange(_most_behind(snake), dtype=np.int32)
    behind = (state.bodies.reshape(snake.snakes, 1, -1) == age[..., None]) & (age > 0)[..., None]
    return jnp.concatenate([*lists, jnp.sum(behind * _place_values(snake), axis=-1).ravel()])


def _at_heads(state: SnakeState) -> Bool[Array, "snakes height width"]:
    return (state.bodies > 0) & (state.bodies == state.lengths[:, None, None])


def _place_values(snake: Snake) -> Int[np.ndarray, " cells"]:
    """Value of each cell in slots of places: 0 is for a place that is absent."""
    return np.arange(1, snake.cells + 1, dtype=np.int32)


def _head_places(state: SnakeState, snake: Snake) -> Int[Array, " snakes"]:
    x, y = state.heads[:, 0], state.heads[:, 1]
    return jnp.where(state.alive, y * snake.width + x + 1, 0)


def _object_places(state: SnakeState, snake: Snake) -> list[Int[Array, " count"]]:
    """Places of the objects of each kind, in the order of the cells."""
    places = []
    for kind in _kinds(snake):
        count = snake.object_counts[kind]
        running = jnp.cumsum((state.objects == kind).ravel(), dtype=jnp.int32)
        ranks = np.arange(count, dtype=np.int32)
        place = jnp.sum(running <= ranks[:, None], axis=-1, dtype=jnp.int32) + 1
        places.append(jnp.where(ranks < running[-1], place, 0))
    return places


def _short_snake_values(state: SnakeState, params: SnakeParams, *, snake: Snake) -> Int[Array, " slots"]:
    """Slot values of the short template."""
    entered, safe = snake.moves(state)
    near = jnp.max(jnp.where(entered, state.objects, NOTHING), axis=(-2, -1)).astype(jnp.int32)
    near = jnp.where(safe, near, _BLOCKED)
    places = [_head_places(state, snake), *(_nearest_first(p, state, snake) for p in _object_places(state, snake))]
    return jnp.concatenate([*places, near, _way_to_meal(state, params, snake)])


def _distances(places: Int[Array, " count"], state: SnakeState, snake: Snake) -> Int[Array, " count"]:
    """Moves from the player's head to each place on an empty board; beyond all others for absent ones."""
    x, y = (places - 1) % snake.width, (places - 1) // snake.width
    away = jnp.abs(x - state.heads[0, 0]) + jnp.abs(y - state.heads[0, 1])
    return jnp.where(places > 0, away, snake.width + snake.height)


def _nearest_first(places: Int[Array, " count"], state: SnakeState, snake: Snake) -> Int[Array, " count"]:
    """The same places, those near the player's head first, absent ones last."""
    return places[jnp.argsort(_distances(places, state, snake), stable=True)]


def _way_to_meal(state: SnakeState, params: SnakeParams, snake: Snake) -> Int[Array, "2"]:
    """Values of `_WAYS`: where the nearest object of positive reward lies, the first cell of several."""
    every = jnp.concatenate([jnp.zeros(1, jnp.int32), *_object_places(state, snake)])
    rewards = [jnp.zeros(1)]
    rewards += [jnp.broadcast_to(params.object_rewards[k], snake.object_counts[k]) for k in _kinds(snake)]
    worth = jnp.where(jnp.concatenate(rewards) > 0, every, 0)
    nearest = worth[jnp.argmin(_distances(worth, state, snake))]
    x, y = (nearest - 1) % snake.width - state.heads[0, 0], (nearest - 1) // snake.width - state.heads[0, 1]
    ways = jnp.stack([jnp.where(x == 0, 0, jnp.where(x < 0, 1, 2)), jnp.where(y == 0, 0, jnp.where(y > 0, 1, 2))])
    return jnp.where((nearest > 0) & state.alive[0], ways, 0).astype(jnp.int32)
