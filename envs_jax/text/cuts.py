r"""Cuts a template into pieces that a tokenizer always tokenises independently, and proves each cut.

Byte-level BPE works inside *pre-tokens*, which a regular expression finds by scanning the text from the left. So the
tokens of a text are those of its pieces if every piece starts where some pre-token starts and its own pre-tokens are
those it has when it stands alone. Proof, by induction from the left, over all texts a template can produce:

* The supported patterns have no look-behind. If a pre-token starts where a piece starts, then what happens from there
  on depends only on the piece and on what follows it.
* How far does the scan of a piece see past its end? Every alternative of the supported patterns either runs on
  through characters of one class, stopping at the first character that is not (letters, digits, punctuation), or reads
  a whole run of white space and one character more (`\s*[\r\n]+`, `\s+(?!\S)`), or compares a contraction of three
  characters (`'re`). So a piece sees at most the white space after it, the next visible character and one more. We
  call this the *head* of what follows, and enumerate all heads, looking through alternatives that are empty.
* Added tokens are found before the pattern is applied, and end the text that the pattern sees. A head is therefore
  never cut inside a possible added token, and a cut that an added token could straddle is not safe.
* Normalisers are the identity on the printable ASCII text to which templates are confined.

A cut that fails is removed by merging the two pieces, whose alternatives become the products of both.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from envs_jax.text.template import Slot, Template
from envs_jax.text.tokenizer import GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN, TextTokenizer

_PATTERNS = (GPT2_PATTERN, QWEN2_PATTERN, LLAMA3_PATTERN)
_HARMLESS_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")
_VISIBLE = re.compile(r"[!-~]")
_ALLOWED_TEXT = re.compile(r"[\t\n\r -~]*")


class RenderError(ValueError):
    """A template that cannot be rendered exactly with a tokenizer."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a template that is tokenised by itself.

    Attributes:
      name: for error messages: the slot's name, or the text in quotes.
      texts: all texts that may stand here; the index runs over the slots' values in row-major order.
      slots: indices of the template's slots in this piece.
    """

    name: str
    texts: tuple[str, ...]
    slots: tuple[int, ...] = ()

    @property
    def is_static(self) -> bool:
        """Whether the text is always the same."""
        return not self.slots


def cut_template(template: Template, tokenizer: TextTokenizer, limit: int) -> list[Piece]:
    """Pieces of `template` with every cut between them proven for `tokenizer`.

    Raises:
      RenderError: the tokenizer's rules or the template's characters are outside the proof, or pieces that cannot be
        cut apart have more than `limit` joint alternatives; the message names the slot.
    """
    _check_characters(template)
    splitter = PreTokenSplitter.of(tokenizer)
    waiting = _first_pieces(template, splitter)
    done: list[Piece] = []
    while waiting:
        piece = waiting.pop(0)
        while waiting and not _cut_is_safe(piece, waiting, splitter, limit):
            piece = _merge(piece, waiting.pop(0), limit)
        done.append(piece)
    return done


@dataclasses.dataclass(frozen=True, eq=False)
class PreTokenSplitter:
    """Splits text as a tokenizer does before BPE: at added tokens, then by its pre-tokenizer."""

    tokenizer: TextTokenizer
    added: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]

    @classmethod
    @functools.cache
    def of(cls, tokenizer: TextTokenizer) -> "PreTokenSplitter":
        """The splitter of `tokenizer`, after checking that the proof covers its rules.

        Raises:
          RenderError: a normaliser, pre-tokenizer, model option or added token that the proof does not cover.
        """
        rules = json.loads(tokenizer.backend.to_str())
        _check_normalizer(rules["normalizer"])
        _check_pre_tokenizer(rules["pre_tokenizer"])
        _check_model(rules["model"])
        _check_added_tokens(rules["added_tokens"])
        # Two passes, as in `tokenizers`: tokens that are matched in the raw text come first.
        passes = [[t["content"] for t in rules["added_tokens"] if t["normalized"] is flag] for flag in (False, True)]
        return cls(tokenizer, tuple(itertools.chain(*passes)), tuple(_any_of(tokens) for tokens in passes if tokens))

    @functools.cache  # noqa: B019  (splitters live as long as their tokenizer)
    def split(self, text: str) -> tuple[str, ...]:
        """Pre-tokens of `text`, which concatenate to it."""
        return tuple(self._split(text, self.patterns))

    def _split(self, text: str, patterns: Sequence[re.Pattern[str]]) -> list[str]:
        if not patterns:
            backend = self.tokenizer.backend.pre_tokenizer
            assert backend is not None  # checked in `of`
            return [text[start:end] for _, (start, end) in backend.pre_tokenize_str(text)]
        pieces = []
        for i, segment in enumerate(patterns[0].split(text)):
            # `split` with one group alternates between text and match.
            pieces += [segment] if i % 2 else self._split(segment, patterns[1:])
        return pieces

    def head(self, text: str) -> str | None:
        """As much of `text` as a piece before it may depend on; None if `text` is too short to tell."""
        visible = _VISIBLE.search(text)
        if visible is None:
            return None
        for end in range(visible.start() + 2, len(text) + 1):
            if not self._may_be_inside_added_token(text[visible.start() : end]):
                return text[:end]
        return None

    def _may_be_inside_added_token(self, text: str) -> bool:
        return any(
            text.endswith(token[:length])
            for token in self.added
            for length in range(1, len(token))  # proper prefixes
        )


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    # Alternatives are tried in order, so the longest come first: leftmost-longest, as `tokenizers` matches.
    return re.compile("(" + "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) + ")")


def _check_characters(template: Template) -> None:
    for part in template.parts:
        name, texts = (part.name, part.alternatives) if isinstance(part, Slot) else ("static text", (part,))
        for text in texts:
            if not _ALLOWED_TEXT.fullmatch(text):
                raise RenderError(f"{name}: {text!r} has characters outside printable ASCII, tab and line breaks")


def _check_normalizer(rule: dict[str, Any] | None) -> None:
    steps = [] if rule is None else rule["normalizers"] if rule["type"] == "Sequence" else [rule]
    for step in steps:
        if step["type"] not in _HARMLESS_NORMALIZERS:
            raise RenderError(f"the tokenizer's normaliser {step['type']!r} may change the text; allowed: none, NFC")


def _check_pre_tokenizer(rule: dict[str, Any] | None) -> None:
    """Refuses everything but the three forms whose look-ahead the proof covers."""
    steps = [] if rule is None else rule["pretokenizers"] if rule["type"] == "Sequence" else [rule]
    kinds = [step["type"] for step in steps]
    last_uses_pattern = bool(steps) and bool(steps[-1].get("use_regex"))
    known = (
        (kinds == ["ByteLevel"] and last_uses_pattern)
        or (kinds == ["Digits", "ByteLevel"] and last_uses_pattern and steps[0]["individual_digits"])
        or (kinds == ["Split", "ByteLevel"] and not last_uses_pattern and _is_known_split(steps[0]))
    )
    if not known or steps[-1]["add_prefix_space"]:
        raise RenderError(f"pre-tokenizer {kinds} is not one whose cuts can be proven (GPT-2, SmolLM, Qwen2, Llama 3)")


def _is_known_split(step: dict[str, Any]) -> bool:
    return step["pattern"].get("Regex") in _PATTERNS and step["behavior"] == "Isolated" and not step["invert"]


def _check_model(rule: dict[str, Any]) -> None:
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if rule.get(option):
            raise RenderError(f"the tokenizer's BPE option {option}={rule[option]!r} is not supported")


def _check_added_tokens(tokens: Iterable[dict[str, Any]]) -> None:
    for token in tokens:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise RenderError(f"added token {token['content']!r} looks at its neighbours; this is not supported")
        if token["content"][0].isspace():
            raise RenderError(f"added token {token['content']!r} begins with white space; this is not supported")


def _first_pieces(template: Template, splitter: PreTokenSplitter) -> list[Piece]:
    """Slots, and static text split into its pre-tokens, so that a merge takes in no more of it than it must."""
    pieces: list[Piece] = []
    slot_index = itertools.count()
    for is_slot, parts in itertools.groupby(template.parts, lambda part: isinstance(part, Slot)):
        if is_slot:
            slots = (part for part in parts if isinstance(part, Slot))
            pieces += [Piece(slot.name, slot.alternatives, (next(slot_index),)) for slot in slots]
        else:
            text = "".join(part for part in parts if isinstance(part, str))
            pieces += [Piece(repr(word), (word,)) for word in splitter.split(text)]
    return pieces


def _cut_is_safe(piece: Piece, rest: Sequence[Piece], splitter: PreTokenSplitter, limit: int) -> bool:
    heads = _heads(piece, rest, splitter, limit)
    return not _can_straddle(piece, rest, splitter.added) and all(
        splitter.split(text + head)[: len(splitter.split(text))] == splitter.split(text)
        for text in set(piece.texts)
        for head in heads
    )


def _heads(piece: Piece, rest: Sequence[Piece], splitter: PreTokenSplitter, limit: int) -> set[str]:
    """Heads of all texts that may follow `piece`; a text without a head of its own is given to its end."""
    heads: set[str] = set()
    unfinished = {""}
    for following in rest:
        longer = {text + more for text in unfinished for more in following.texts}
        found = {text: splitter.head(text) for text in longer}
        heads |= {head for head in found.values() if head is not None}
        unfinished = {text for text, head in found.items() if head is None}
        if len(heads) + len(unfinished) > limit:
            raise RenderError(
                f"slot {piece.name!r}: more than {limit:,} continuations up to slot {following.name!r} to check; put"
                " visible static text between them"
            )
        if not unfinished:
            break
    return heads | unfinished


def _can_straddle(piece: Piece, rest: Sequence[Piece], added: Iterable[str]) -> bool:
    """Whether an added token can begin in `piece` and end after it."""
    starts = {
        token[length:]
        for token in added
        for length in range(1, len(token))
        if any(text.endswith(token[:length]) for text in piece.texts)
    }
    return any(_can_begin(rest, remainder) for remainder in starts)


def _can_begin(pieces: Sequence[Piece], wanted: str) -> bool:
    """Whether the text of `pieces` can begin with `wanted`."""
    remainders = {wanted}
    for piece in pieces:
        pairs = [(remainder, text) for remainder in remainders for text in set(piece.texts)]
        if any(text.startswith(remainder) for remainder, text in pairs):
            return True
        remainders = {remainder[len(text) :] for remainder, text in pairs if remainder.startswith(text)}
        if not remainders:
            break
    return False


def _merge(left: Piece, right: Piece, limit: int) -> Piece:
    size = len(left.texts) * len(right.texts)
    if size > limit:
        raise RenderError(
            f"slot {left.name!r} cannot be cut from {right.name!r} with this tokenizer, and together they have {size:,}"
            f" alternatives (limit {limit:,}); put a text between them where the tokenizer always cuts"
        )
    texts = tuple(a + b for a, b in itertools.product(left.texts, right.texts))
    names = [piece.name for piece in (left, right) if piece.slots] or [left.name]
    return Piece("+".join(names), texts, left.slots + right.slots)
