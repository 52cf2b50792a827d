"""Reads the action out of a reply, token by token, inside a compiled function.

The text between the first `<action>` and the next `</action>`, stripped of ASCII whitespace and in ASCII lower case, is
one of the action words; anything else is unreadable. The automaton is total: sampled bytes need not be UTF-8.
"""

import dataclasses
import string

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from envs_jax.text.automaton import Tables, Vocabulary, class_of, explore, lift, narrow, token_classes

OPEN, CLOSE = "<action>", "</action>"
_WHITESPACE = string.whitespace.encode()  # the same six bytes that bytes.strip() removes
_UNREADABLE = b""  # no action word is empty


@dataclasses.dataclass(frozen=True, eq=False)
class Reader(Tables):
    """The reply reader of one game and one tokenizer; `Reader.compile` makes it.

    **Fields:** `class_map` gives the token class of each id, its last entry that of every id outside the vocabulary;
    `table` the next state; `is_closed` whether the action has closed; `actions` the index of the word read, else -1.
    """

    class_map: Int[np.ndarray, " vocab_and_one"]
    table: Int[np.ndarray, "states classes"]
    is_closed: Bool[np.ndarray, " states"]
    actions: Int[np.ndarray, " states"]
    start: int = 0

    @staticmethod
    def compile(actions: tuple[str, ...], tokenizer: Vocabulary) -> "Reader":
        """Build the tables. Raises `ValueError` for action words that `check_actions` refuses."""
        words = check_actions(actions)
        states = explore(_START, lambda state: [_follow(state, byte, words) for byte in range(256)])
        table = [[states[_follow(state, byte, words)] for byte in range(256)] for state in states]
        # One token more than there are: the empty one, for ids outside the vocabulary.
        columns = lift(np.array(table), [*tokenizer.token_bytes[: tokenizer.vocab_size], b""])
        class_map, token_table = token_classes(columns)
        closed = [isinstance(state, _Closing) and state.matched == len(CLOSE) for state in states]
        read = [
            words.index(state.word) if isinstance(state, _Closing) and done and state.word else -1
            for state, done in zip(states, closed, strict=True)
        ]
        return Reader(
            class_map=class_map,
            table=narrow(token_table),
            is_closed=np.array(closed),
            actions=np.array(read, dtype=np.int32),
        )

    def step(self, state: Int[ArrayLike, "*#batch"], token: Int[ArrayLike, "*#batch"]) -> Int[Array, "..."]:
        """State after one more token. Control tokens and ids outside the vocabulary change nothing."""
        return jnp.asarray(self.table)[state, class_of(self.class_map, token)].astype(jnp.int32)

    def closed(self, state: Int[ArrayLike, "*batch"]) -> Bool[Array, "*batch"]:
        """Whether the first action has been opened and closed, readable or not; no token changes such a state."""
        return jnp.asarray(self.is_closed)[state]

    def action(self, state: Int[ArrayLike, "*batch"]) -> Int[Array, "*batch"]:
        """Index of the action that was read; -1 while it is open and when it is unreadable."""
        return jnp.asarray(self.actions)[state]


def check_actions(actions: tuple[str, ...]) -> tuple[bytes, ...]:
    """The action words as the reader compares them: UTF-8, stripped, lower case.

    Raises `ValueError` where there is no word, or one is empty, contains '<' or reads like another.
    """
    if not actions:
        raise ValueError("no action words were given: give at least one")
    words = tuple(action.encode().strip().lower() for action in actions)
    for index, (action, word) in enumerate(zip(actions, words, strict=True)):
        if not word:
            raise ValueError(f"action word {index} ({action!r}) is empty: give a word with a visible character")
        if b"<" in word:
            raise ValueError(f"action word {action!r} contains '<', which begins a tag: leave it out")
        if word in words[:index]:
            other = actions[words.index(word)]
            raise ValueError(
                f"action words {other!r} and {action!r} read the same: make them differ in more than case and space"
            )
    return words


@dataclasses.dataclass(frozen=True)
class _Seeking:
    """Before the action: so many bytes of the opening tag are matched."""

    matched: int


@dataclasses.dataclass(frozen=True)
class _Reading:
    """Inside the action: the text so far, left-stripped and in lower case; it begins or is a word."""

    text: bytes
    trailing: bool  # whitespace that no longer word goes on with


@dataclasses.dataclass(frozen=True)
class _Closing:
    """So many bytes of the closing tag are matched after this word (or after unreadable text)."""

    word: bytes
    matched: int


_State = _Seeking | _Reading | _Closing
_START: _State = _Seeking(0)


def _follow(state: _State, byte: int, words: tuple[bytes, ...]) -> _State:
    """The state after one more byte."""
    if isinstance(state, _Seeking):
        matched = _match(OPEN.encode(), state.matched, byte)
        return _Reading(b"", False) if matched == len(OPEN) else _Seeking(matched)
    if isinstance(state, _Closing):
        return _follow_closing(state, byte)
    if byte == ord("<"):
        word = state.text.rstrip()
        return _Closing(word if word in words else _UNREADABLE, 1)
    if byte in _WHITESPACE and (state.trailing or not state.text):
        return state
    text = state.text + bytes([byte]).lower()
    if not state.trailing and any(word.startswith(text) for word in words):
        return _Reading(text, False)
    if byte in _WHITESPACE and state.text.rstrip() in words:
        return _Reading(state.text.rstrip(), True)
    return _Closing(_UNREADABLE, 0)


def _follow_closing(state: _Closing, byte: int) -> _Closing:
    if state.matched == len(CLOSE):
        return state
    matched = _match(CLOSE.encode(), state.matched, byte)
    # Whatever was taken for the closing tag and is not belongs to the text, which then is no word.
    return _Closing(state.word if matched == state.matched + 1 else _UNREADABLE, matched)


def _match(tag: bytes, matched: int, byte: int) -> int:
    """Bytes of the tag matched after one more byte: the longest end of what was read that begins the tag."""
    seen = tag[:matched] + bytes([byte])
    return next(size for size in range(len(seen), -1, -1) if tag.startswith(seen[len(seen) - size :]))
