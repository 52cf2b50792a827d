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
from envs_jax.text.grammar import Constraint, Reader, ReplyMode
from envs_jax.text.renderer import Renderer, compile_template
from envs_jax.text.template import Slot, Template
from envs_jax.text.tokenizer import TextTokenizer, chat_messages

Style = Literal["full", "short"]
"""`"full"` explains the game; `"short"` is the bare board, for small models that are trained from nothing."""


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

    def __post_init__(self):
        if len(self.actions) != self.environment.num_actions:
            raise GameError(f"{len(self.actions)} action words for {self.environment.num_actions} actions; name each")

    def text(self, state: EnvironmentState) -> str:
        """The observation of one (unbatched) state, on the host."""
        values = self.slot_values(jax.tree.map(jnp.asarray, state), self.params)
        return self.template.text(np.asarray(values).tolist())

    def messages(self, state: EnvironmentState) -> list[dict[str, str]]:
        """The chat of one step: system message and observation."""
        return chat_messages(self.system, self.text(state))


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
    before, after = tokenizer.chat_frame(game.system, game.template.examples())
    return TokenizedGame(
        game=game,
        tokenizer=tokenizer,
        renderer=compile_template(game.template, tokenizer, before=before, after=after),
        reader=Reader.compile(game.actions, tokenizer),
        constraint=Constraint.compile(game.actions, tokenizer, reply=game.reply) if constrain else None,
        reply_limit=reply_limit,
    )


def make_game(name: str, *, style: str = "full", reply: str = "action", **options: Any) -> TextGame:
    """The named scenario.

    Args:
      name: one of `GAMES`.
      style: how much the text says: a `Style`.
      reply: the form of the reply: a `ReplyMode`.
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
    return GAMES[name](name=name, style=style, reply=reply, **options)


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
        system=_lake_system(lake, success_rate, reply) if full else _short_system(reply),
        template=_lake_template(lake.size, goals) if full else Template(_lake_grid(lake.size)),
        slot_values=functools.partial(_lake_values, goals=goals if full else None),
        won=_lake_won,
        actions=LAKE_ACTIONS,
        reply=reply,
    )


GAMES: Mapping[str, Callable[..., TextGame]] = {
    "frozen-lake": functools.partial(frozen_lake_game, size=4, frozen_probability=0.8, success_rate=1.0, max_steps=8),
    "frozen-lake-slippery": functools.partial(frozen_lake_game, size=4, frozen_probability=0.9, max_steps=15),
    "frozen-lake-big-slippery": functools.partial(frozen_lake_game, size=6, frozen_probability=0.9, max_steps=15),
    "frozen-lake-ragen": functools.partial(
        frozen_lake_game, size=4, frozen_probability=0.8, random_start=True, random_goal=True, max_steps=10
    ),
}
"""Scenarios by name; each makes its game from `name`, `style`, `reply` and the game's own options."""


def _check_choice(option: str, given: str, allowed: Sequence[str]) -> None:
    if given not in allowed:
        raise GameError(f"{option} {given!r} is unknown; allowed: {', '.join(allowed)}")


def _reply_form(reply: ReplyMode) -> str:
    action = f"<action>{LAKE_ACTIONS[0]}</action>"
    return action if reply == "action" else f"<think>your thoughts</think><plan>your plan</plan>{action}"


def _short_system(reply: ReplyMode) -> str:
    return f"Reach G, avoid H. {_reply_form(reply)}"


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
        f"Answer with one action in exactly this form and nothing after it: {_reply_form(reply)}"
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
