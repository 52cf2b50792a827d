"""Keeps a sampled reply readable: the tokens allowed at each point, as tables for a compiled sampler.

A regular expression gives an automaton over bytes. In free text every token is allowed that keeps it alive. Everything
else (tags, action words) is *spelled*: from the point where it begins, only the tokenizer's own encoding is allowed.
Each action is then one sequence of tokens, and where there is a single allowed token no logits are needed.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

import jax.numpy as jnp
import numpy as np
import outlines_core
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from envs_jax.text.automaton import DEAD, Tables, Vocabulary, class_of, explore, lift, minimise, narrow, token_classes
from envs_jax.text.reader import CLOSE, OPEN, check_actions

ReplyMode = Literal["action", "think"]
MOST_CHOICES = 64
"""A game whose states allow at most so many tokens gets them listed, so that only their logits are computed."""

_UNREACHABLE = np.iinfo(np.int32).max

# What is left to spell: token ids, then the byte state in which they end.
_Spelling = tuple[tuple[int, ...], int]
# A state over tokens: a byte state (free text, or the finished reply), or the spellings that are still possible.
_State = int | frozenset[_Spelling]


@dataclasses.dataclass(frozen=True, eq=False)
class Constraint(Tables):
    """Which tokens can still end in a readable reply; `Constraint.compile` makes it.

    **Fields:**

    - `class_map`: the token class of each id, its last entry that of every id outside the vocabulary.
    - `table`: the next state, -1 where a token is not allowed.
    - `start`, `finished`: the first state and the one of a complete reply.
    - `distance`: tokens that suffice to get from each state to `finished`: the fewest that lead out of free text, and
      then enough for the longest action, so that running out of tokens never decides which action it is.
    - `choices`: the ids allowed in each state, padded with -1; None where a state that is not forced allows more than
      `MOST_CHOICES`.
    - `forced_ids`, `forced_length`, `forced_next`: the longest run of tokens from each state that are each the only one
      allowed (padded with -1), its length, and the state after it.
    - `start_run`: the forced run of the start state.
    - `max_middle_run`: longest forced run after a token that was a choice, where the run does not end the reply.
    """

    class_map: Int[np.ndarray, " vocab_and_one"]
    table: Int[np.ndarray, "states classes"]
    start: int
    finished: int
    distance: Int[np.ndarray, " states"]
    choices: Int[np.ndarray, "states choices"] | None
    forced_ids: Int[np.ndarray, "states run"]
    forced_length: Int[np.ndarray, " states"]
    forced_next: Int[np.ndarray, " states"]
    start_run: tuple[int, ...]
    max_middle_run: int

    @staticmethod
    def compile(actions: tuple[str, ...], tokenizer: Vocabulary, *, reply: ReplyMode = "action") -> "Constraint":
        """Build the tables for `<action>word</action>`, or with `<think>` and `<plan>` texts before it.

        Raises `ValueError` for action words that `check_actions` refuses and for a tokenizer that cannot spell them.
        """
        check_actions(actions)
        automaton = _token_automaton(_compile_pattern(reply_pattern(actions, reply)), tokenizer)
        class_map, start, finished = automaton.class_map, automaton.start, automaton.finished
        table = _without_dead_ends(automaton.table, finished)
        allowed = [np.flatnonzero(row[class_map[:-1]] != DEAD) for row in table]
        forced_ids, forced_length, forced_next = _forced_runs(table, class_map, allowed)
        return Constraint(
            class_map=class_map,
            table=narrow(table),
            start=start,
            finished=finished,
            distance=_distances(table, finished, automaton.spelled),
            choices=_list_choices(allowed),
            forced_ids=forced_ids,
            forced_length=forced_length,
            forced_next=forced_next,
            start_run=tuple(forced_ids[start, : forced_length[start]].tolist()),
            max_middle_run=_max_middle_run(table, allowed, forced_length, forced_next, finished),
        )

    def next_state(self, state: Int[ArrayLike, "*#batch"], token: Int[ArrayLike, "*#batch"]) -> Int[Array, "..."]:
        """State after one more token; -1 (and -1 from then on) when it was not allowed. A finished reply stays so."""
        state = jnp.asarray(state, jnp.int32)
        following = jnp.asarray(self.table)[state, class_of(self.class_map, token)].astype(jnp.int32)
        return jnp.where((state == self.finished) | (state < 0), state, following)

    def allowed(
        self,
        state: Int[ArrayLike, "*batch"],
        *,
        remaining: Int[ArrayLike, "*batch"] | None = None,
        vocab_size: int | None = None,
    ) -> Bool[Array, "*batch vocab"]:
        """The tokens allowed next: none for a finished reply, nor ever an id beyond the tokenizer's vocabulary.

        `remaining` is the number of tokens, this one included, in which the reply has to be complete: with it, only
        tokens that leave enough for the rest. There is always one if at least `distance[start]` were granted at first.
        `vocab_size` is the width of the mask (default: the tokenizer's own vocabulary).
        """
        width = len(self.class_map) - 1 if vocab_size is None else vocab_size
        return self.allows(state, np.arange(width), remaining=remaining)

    def allows(
        self,
        state: Int[ArrayLike, "*batch"],
        ids: Int[ArrayLike, " some"],
        *,
        remaining: Int[ArrayLike, "*batch"] | None = None,
    ) -> Bool[Array, "*batch some"]:
        """Which of the tokens `ids` are allowed next, for those who go through the vocabulary a chunk at a time."""
        state = jnp.asarray(state)
        following = jnp.asarray(self.table)[state]
        open_classes = (following != DEAD) & (state >= 0)[..., None]
        if remaining is not None:
            open_classes &= jnp.asarray(self.distance)[following] < jnp.asarray(remaining)[..., None]
        return open_classes[..., class_of(self.class_map, ids)]

    def done(self, state: Int[ArrayLike, "*batch"]) -> Bool[Array, "*batch"]:
        """Whether the reply is complete."""
        return jnp.asarray(state) == self.finished


def reply_pattern(actions: tuple[str, ...], reply: ReplyMode) -> str:
    """The regular expression of readable replies."""
    words = "|".join(map(_literal, actions))
    action = f"{_literal(OPEN)}(?:{words}){_literal(CLOSE)}"
    if reply == "action":
        return action
    thought, plan = _free_text("</think>", OPEN), _free_text("</plan>", OPEN)
    return f"{_literal('<think>')}{thought}{_literal('<plan>')}{plan}{action}"


def _literal(text: str) -> str:
    return "".join(rf"\x{{{ord(character):x}}}" for character in text)


def _free_text(end: str, barred: str) -> str:
    """Any text up to and with the first `end` in which `barred` does not occur.

    The dialect has no lookahead, so this spells out the automaton that looks for both tags at once. In both, '<' is the
    first character and no other: what follows the last '<' read begins a tag (is in `partial`) until it breaks off.
    """
    tags = (end[1:], barred[1:])
    partial = sorted({tag[:size] for tag in tags for size in range(len(tag))})
    breaks = []
    for beginning in partial:
        onward = {tag[len(beginning)] for tag in tags if tag.startswith(beginning)}
        breaks.append(_literal(beginning) + f"[^{_literal('<' + ''.join(sorted(onward)))}]")
    opener = f"<(?:(?:{'|'.join(map(_literal, partial))})<)*"
    return f"(?:[^<]|{opener}(?:{'|'.join(breaks)}))*{opener}{_literal(end[1:])}"


@dataclasses.dataclass(frozen=True)
class _ByteAutomaton:
    table: Int[np.ndarray, "states 256"]
    start: int
    final: Bool[np.ndarray, " states"]


def _compile_pattern(pattern: str) -> _ByteAutomaton:
    """The smallest byte automaton of a regular expression over (UTF-8) text, without dead ends."""
    end = 256
    # 0xFF occurs in no UTF-8 text, and the library takes it for a marker of its own.
    vocabulary = outlines_core.Vocabulary(end, {bytes([byte]): [byte] for byte in range(255)})
    index = outlines_core.Index(pattern, vocabulary)
    transitions = index.get_transitions()
    final_states = index.get_final_states()
    numbers = {state: number for number, state in enumerate({index.get_initial_state(), *transitions, *final_states})}
    table = np.full((len(numbers), 256), DEAD)
    for state, following in transitions.items():
        for byte, target in following.items():
            if byte != end:
                table[numbers[state], byte] = numbers[target]
    final = np.array([state in final_states for state in numbers])
    table = _without_dead_ends(table, np.flatnonzero(final))
    return _ByteAutomaton(*minimise(table, numbers[index.get_initial_state()], final))


@dataclasses.dataclass(frozen=True)
class _TokenAutomaton:
    class_map: Int[np.ndarray, " vocab_and_one"]
    table: Int[np.ndarray, "states classes"]
    start: int
    finished: int
    spelled: Bool[np.ndarray, " states"]  # states in which a tag or an action is being spelled, not text written


def _token_automaton(automaton: _ByteAutomaton, tokenizer: Vocabulary) -> _TokenAutomaton:
    """Lift to tokens: the automaton's own alphabet in free text, the tokenizer's spelling everywhere else."""
    free = np.flatnonzero(_cyclic(automaton.table)).tolist()
    finished = int(np.flatnonzero(automaton.final).item())
    entries = _Entries(automaton, {*free, finished}, tokenizer)
    lifted = dict(zip(free, _lift_text(automaton.table, free, tokenizer), strict=True))

    def targets(state: _State) -> Iterable[_State]:
        if not isinstance(state, int):
            return _spelled_targets(state).values()
        arrivals = np.unique(lifted[state]).tolist() if state in lifted else []
        return [entry for arrival in arrivals if arrival != DEAD and (entry := entries[arrival]) is not None]

    start = entries[automaton.start]
    assert start is not None, "a reply begins with a whole character"
    numbers = explore(start, targets)
    if finished not in numbers:
        raise ValueError("this tokenizer has no tokens that complete a reply: use one that covers all of ASCII")
    # Indexed by byte state; the last entry is reached as index -1, from a dead one.
    number_of_entry = np.full(len(automaton.table) + 1, DEAD)
    for arrival, entry in entries.items():
        number_of_entry[arrival] = DEAD if entry is None else numbers.get(entry, DEAD)
    rows = np.full((len(numbers), tokenizer.vocab_size + 1), DEAD, dtype=np.int32)
    for state, number in numbers.items():
        if not isinstance(state, int):
            for token, target in _spelled_targets(state).items():
                rows[number, token] = numbers[target]
        elif state in lifted:
            rows[number, :-1] = number_of_entry[lifted[state]]
    class_map, table = token_classes(narrow(rows))
    spelled = np.array([not isinstance(state, int) for state in numbers])
    return _TokenAutomaton(class_map, table, numbers[start], numbers[finished], spelled)


def _lift_text(
    table: Int[np.ndarray, "states 256"], free: list[int], tokenizer: Vocabulary
) -> Int[np.ndarray, "free vocab"]:
    """Byte states after each token in free text; tokens that are not text are dead."""
    pieces = tokenizer.token_bytes[: tokenizer.vocab_size]
    if not free:
        return np.empty((0, len(pieces)), dtype=np.int16)
    lifted = lift(table, pieces)[free]
    not_text = [token for token, piece in enumerate(pieces) if not piece]
    lifted[:, sorted({*not_text, *tokenizer.special_ids, *tokenizer.eos_ids})] = DEAD
    return lifted


class _Entries(dict[int, _State | None]):
    """Token state in which a token that ends in a byte state arrives: that state itself, or what remains to be spelled.

    None where the remainder begins inside a character and so is no text to encode.
    """

    def __init__(self, automaton: _ByteAutomaton, stops: set[int], tokenizer: Vocabulary):
        super().__init__({stop: stop for stop in stops})
        self._automaton, self._stops, self._tokenizer = automaton, stops, tokenizer

    def __missing__(self, state: int) -> _State | None:
        try:
            texts = [(text.decode(), stop) for text, stop in self._completions(state)]
        except UnicodeDecodeError:
            self[state] = None
        else:
            self[state] = frozenset((_spell(text, self._tokenizer), stop) for text, stop in texts)
        return self[state]

    def _completions(self, state: int) -> list[tuple[bytes, int]]:
        """All ways on from a state to the first free text or the end of the reply."""
        if state in self._stops:
            return [(b"", state)]
        row = self._automaton.table[state]
        return [
            (bytes([byte]) + rest, stop)
            for byte in np.flatnonzero(row != DEAD).tolist()
            for rest, stop in self._completions(int(row[byte]))
        ]


def _spell(text: str, tokenizer: Vocabulary) -> tuple[int, ...]:
    """The tokenizer's encoding of a text, checked to stand for exactly these bytes."""
    ids = tuple(tokenizer.encode(text))
    control = {*tokenizer.special_ids, *tokenizer.eos_ids}
    if control & set(ids) or b"".join(tokenizer.token_bytes[token] for token in ids) != text.encode():
        raise ValueError(
            f"this tokenizer cannot spell {text!r} exactly (it gives ids {list(ids)}): "
            "choose other action words or another tokenizer"
        )
    return ids


def _spelled_targets(state: frozenset[_Spelling]) -> dict[int, _State]:
    """Next state for each token that begins one of the spellings.

    No completion is the beginning of another, so a spelling that ends is the only one left.
    """
    targets: dict[int, _State] = {}
    for first in sorted({ids[0] for ids, _ in state}):
        rest = frozenset((ids[1:], stop) for ids, stop in state if ids[0] == first)
        ended = [stop for ids, stop in rest if not ids]
        targets[first] = ended[0] if ended else rest
    return targets


def _cyclic(table: Int[np.ndarray, "states symbols"]) -> Bool[np.ndarray, " states"]:
    """States that can be visited again, that is, from which the language is not just a list of texts."""
    states = len(table)
    reach = np.zeros((states, states), dtype=bool)
    source, symbol = np.nonzero(table != DEAD)
    reach[source, table[source, symbol]] = True
    for middle in range(states):  # Warshall's transitive closure
        reach |= reach[:, middle, None] & reach[None, middle, :]
    return np.diagonal(reach)


def _without_dead_ends(
    table: Int[np.ndarray, "states symbols"], final: int | np.ndarray
) -> Int[np.ndarray, "states symbols"]:
    """The table less the steps from which no final state can be reached."""
    live = _distances(table, final, np.zeros(len(table), dtype=bool)) != _UNREACHABLE
    return np.where((table != DEAD) & live[table], table, DEAD)


def _distances(
    table: Int[np.ndarray, "states symbols"], final: int | np.ndarray, farthest: Bool[np.ndarray, " states"]
) -> Int[np.ndarray, " states"]:
    """Steps from each state to a final one: by its nearest next state or, where `farthest`, by its farthest."""
    distance = np.full(len(table), _UNREACHABLE, dtype=np.int64)
    distance[final] = 0
    while True:
        following = distance[table]
        nearest = np.where(table == DEAD, _UNREACHABLE, following).min(axis=1)
        onward = np.where(farthest, np.where(table == DEAD, DEAD, following).max(axis=1), nearest)
        shorter = np.minimum(distance, np.minimum(onward + 1, _UNREACHABLE))
        if np.array_equal(shorter, distance):
            return distance.astype(np.int32)
        distance = shorter


def _list_choices(allowed: list[np.ndarray]) -> Int[np.ndarray, "states choices"] | None:
    most = max(map(len, allowed))
    if most > MOST_CHOICES:
        return None
    choices = np.full((len(allowed), most), -1, dtype=np.int32)
    for row, tokens in zip(choices, allowed, strict=True):
        row[: len(tokens)] = tokens
    return choices


def _forced_runs(
    table: Int[np.ndarray, "states classes"], class_map: Int[np.ndarray, " vocab_and_one"], allowed: list[np.ndarray]
) -> tuple[Int[np.ndarray, "states run"], Int[np.ndarray, " states"], Int[np.ndarray, " states"]]:
    """Runs of tokens that are each the only one allowed: `(ids, length, state after)`.

    They end, because every state leads to the finished reply.
    """
    runs, after = [], []
    for state in range(len(table)):
        run = []
        while len(allowed[state]) == 1:
            run.append(int(allowed[state][0]))
            state = int(table[state, class_map[run[-1]]])
        runs.append(run)
        after.append(state)
    ids = np.full((len(runs), max(map(len, runs))), -1, dtype=np.int32)
    for row, run in zip(ids, runs, strict=True):
        row[: len(run)] = run
    return ids, np.array([len(run) for run in runs], dtype=np.int32), np.array(after, dtype=np.int32)


def _max_middle_run(
    table: Int[np.ndarray, "states classes"],
    allowed: list[np.ndarray],
    forced_length: Int[np.ndarray, " states"],
    forced_next: Int[np.ndarray, " states"],
    finished: int,
) -> int:
    chosen = np.unique([table[state] for state in range(len(table)) if len(allowed[state]) > 1])
    middle = [state for state in chosen if state != DEAD and forced_next[state] != finished]
    return max((int(forced_length[state]) for state in middle), default=0)
