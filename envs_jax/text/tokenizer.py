"""Byte-level BPE tokenizers as the renderer and the reply automata need them: ids, raw bytes, control tokens, frame.

Everything is built on Hugging Face `tokenizers`; neither torch nor (unless a hub name is given) `transformers` is
imported.
"""

import base64
import dataclasses
import datetime
import functools
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, SupportsIndex

import jinja2
import jinja2.sandbox
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)

CHATML_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML, for tokenizers that come without a chat template of their own (Qwen's ranks file)."""

END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
"""Control tokens that end a reply in every family that has them."""

# Qwen2.5's added tokens, from id 151643 on, in the order of its tokenizer_config.json; only the first are "special".
_QWEN_CONTROL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
_QWEN_PLAIN = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
)
_QWEN_BASE_SIZE = 151643

_GGUF_CONTROL, _GGUF_USER_DEFINED, _GGUF_UNUSED = 3, 4, 5


_SENTINEL = "5f0d7c31e8"  # stands for the user message; no chat template or system message holds it


Shot = tuple[str, str]
"""A user message and the reply to it."""


class TokenizerError(ValueError):
    """A tokenizer file that is missing, damaged or of a kind that is not supported."""


@dataclasses.dataclass(frozen=True, eq=False)
class TextTokenizer:
    """A byte-level BPE tokenizer with its chat template.

    Attributes:
      backend: the `tokenizers` object that does the work.
      token_bytes: for every id its raw bytes; `b""` for control tokens and for ids that are not in use.
      special_ids: control tokens, never to be sampled inside a text. Added tokens that stand for text are not here.
      eos_ids: every id that ends a reply, in ascending order. A set on purpose: Qwen has two.
      chat_template: a Jinja template in the Hugging Face convention.
      special_tokens: names such as `bos_token` that chat templates may refer to.
    """

    backend: tokenizers.Tokenizer
    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    chat_template: str
    special_tokens: Mapping[str, str]

    @property
    def vocab_size(self) -> int:
        """Number of ids that mean something. A model's vocabulary may be padded to more."""
        return len(self.token_bytes)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; control tokens written in the text are recognised, none are added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """The text of `ids`, control tokens included."""
        return self.backend.decode([operator.index(i) for i in ids], skip_special_tokens=False)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The whole prompt as a string: `messages` (each with `role` and `content`) in the checkpoint's chat frame."""
        try:
            return _compile_template(self.chat_template).render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self.special_tokens
            )
        except jinja2.TemplateError as error:
            roles = [message["role"] for message in messages]
            raise TokenizerError(
                f"the tokenizer's chat template refuses messages with roles {roles}: {error}"
            ) from error

    def chat_frame(self, system: str, examples: Iterable[str], shots: Sequence[Shot] = ()) -> tuple[str, str]:
        """What the chat template puts before and after the last user message of a chat.

        Args:
          system: content of the system message.
          shots: earlier turns, see `chat_messages`.
          examples: contents of the user message, on which the frame is checked.

        Raises:
          TokenizerError: the template alters a user message, trims it, or shows it other than once.
        """
        parts = self.apply_chat_template(chat_messages(system, _SENTINEL, shots)).split(_SENTINEL)
        if len(parts) != 2:
            raise TokenizerError(f"the chat template shows the user message {len(parts) - 1} times; it must do so once")
        before, after = parts
        for example in examples:
            if self.apply_chat_template(chat_messages(system, example, shots)) != before + example + after:
                raise TokenizerError(f"the chat template alters the user message {example!r}; another one is needed")
        return before, after

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the files from which `from_pretrained`, and transformers, make this tokenizer.

        The ids that end a reply go into `generation_config.json`, where transformers looks for them.
        """
        folder = Path(folder)
        self.backend.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        ends = {"eos_token_id": list(self.eos_ids)}
        for name, values in (
            ("tokenizer_config.json", config | dict(self.special_tokens)),
            ("generation_config.json", ends),
        ):
            (folder / name).write_text(json.dumps(values, indent=1, ensure_ascii=False), "utf-8")
        (folder / "chat_template.jinja").write_text(self.chat_template, "utf-8")

    @classmethod
    def tiny(cls) -> "TextTokenizer":
        """The small tokenizer that ships with this package (see `tiny/build.py`)."""
        return _load_tiny()

    @classmethod
    def from_gguf(cls, path: str | Path) -> "TextTokenizer":
        """The tokenizer in the header of a GGUF file (needs the `gguf` extra).

        Tokens that fill up the vocabulary (`[PAD151665]` in Qwen's files) are ids that are not in use.

        Raises:
          TokenizerError: the file cannot be read, or its pre-tokenizer is not one of `PRE_TOKENIZERS`.
        """
        fields = _read_gguf_header(Path(path))
        model, name = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
        if model != "gpt2":
            raise TokenizerError(
                f"{path}: tokenizer model {model!r} is not supported; allowed: 'gpt2' (byte-level BPE)"
            )
        if name not in PRE_TOKENIZERS:
            known = ", ".join(sorted(PRE_TOKENIZERS))
            raise TokenizerError(f"{path}: pre-tokenizer {name!r} is not supported; allowed: {known}")
        parts = ("tokens", "token_type", "merges")
        if missing := [part for part in parts if f"tokenizer.ggml.{part}" not in fields]:
            raise TokenizerError(f"{path}: the header has no tokenizer.ggml.{missing[0]}; the tokenizer is incomplete")
        try:
            return _from_gguf_fields(fields, name)
        except TokenizerError:
            raise
        except Exception as error:  # `tokenizers` raises bare Exception where merges and tokens contradict each other
            reason = str(error).splitlines()[0]
            raise TokenizerError(f"{path}: the tokenizer in the header is damaged ({reason})") from error

    @classmethod
    def from_tiktoken(cls, path: str | Path) -> "TextTokenizer":
        """Qwen2.5's tokenizer from its ranks file (`qwen.tiktoken`), with a ChatML template of our own.

        Each line holds a token's bytes in base64 and its rank. The merges are rebuilt from the ranks: the last merge
        of a token joins the two parts that byte-pair encoding with lower ranks only would leave of it.

        Raises:
          TokenizerError: the file cannot be read or does not hold Qwen's 151,643 tokens.
        """
        ranks = _read_ranks(Path(path))
        if len(ranks) != _QWEN_BASE_SIZE:
            raise TokenizerError(f"{path}: {len(ranks)} ranks; only Qwen's file with {_QWEN_BASE_SIZE} is supported")
        alphabet = _byte_to_unicode()
        spelled = {token: "".join(alphabet[b] for b in token) for token in ranks}
        merges = [(spelled[a], spelled[b]) for a, b in _merges_from_ranks(ranks)]
        backend = _byte_level_bpe({spelled[token]: rank for token, rank in ranks.items()}, merges, "qwen2")
        backend.add_special_tokens([_added(token, True) for token in _QWEN_CONTROL])
        backend.add_tokens([_added(token, False) for token in _QWEN_PLAIN])
        return _assemble(backend, CHATML_TEMPLATE, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})

    @classmethod
    def from_pretrained(cls, path_or_name: str | Path) -> "TextTokenizer":
        """The tokenizer of a Hugging Face checkpoint: a local folder with `tokenizer.json`, or a hub name.

        Raises:
          TokenizerError: nothing usable is there, or the tokenizer is not byte-level BPE.
        """
        folder = Path(path_or_name)
        if (folder / "tokenizer.json").is_file():
            return _from_folder(folder)
        # Imported here only: it takes seconds, and neither the shipped tokenizer nor local folders need it.
        from transformers import AutoTokenizer

        try:
            loaded = AutoTokenizer.from_pretrained(str(path_or_name))
            backend = tokenizers.Tokenizer.from_str(loaded.backend_tokenizer.to_str())
        except (OSError, ValueError, AttributeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise TokenizerError(f"no tokenizer at {str(path_or_name)!r}: {reason}") from error
        named = {key: str(value) for key, value in loaded.special_tokens_map.items() if isinstance(value, str)}
        return _assemble(backend, loaded.chat_template or CHATML_TEMPLATE, named)


def chat_messages(system: str, user: str, shots: Sequence[Shot] = ()) -> list[dict[str, str]]:
    """A system message, `shots` as turns that went before, and a user message, in the form that chat templates take."""
    messages = [{"role": "system", "content": system}]
    for asked, answered in shots:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return [*messages, {"role": "user", "content": user}]


def _pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _smollm_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


PRE_TOKENIZERS = {
    "gpt2": lambda: _pre_tokenizer(GPT2_PATTERN),
    "gpt-2": lambda: _pre_tokenizer(GPT2_PATTERN),
    "smollm": _smollm_pre_tokenizer,
    "qwen2": lambda: _pre_tokenizer(QWEN2_PATTERN),
    "llama-bpe": lambda: _pre_tokenizer(LLAMA3_PATTERN),
    "llama3": lambda: _pre_tokenizer(LLAMA3_PATTERN),
    "llama-v3": lambda: _pre_tokenizer(LLAMA3_PATTERN),
}
"""Pre-tokenizers by the name that GGUF files give them."""


def _byte_level_bpe(vocab: dict[str, int], merges: Sequence[tuple[str, ...]], name: str) -> tokenizers.Tokenizer:
    # Llama 3 takes a whole pre-token that is in the vocabulary without asking the merges.
    model = models.BPE(vocab=vocab, merges=list(merges), ignore_merges=name.startswith("llama"))  # pyright: ignore
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = PRE_TOKENIZERS[name]()
    backend.decoder = decoders.ByteLevel()
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _assemble(
    backend: tokenizers.Tokenizer, chat_template: str, special_tokens: Mapping[str, str], ends: Iterable[int] = ()
) -> TextTokenizer:
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    _check_byte_level(backend)
    added = backend.get_added_tokens_decoder()
    control = frozenset(i for i, token in added.items() if token.special)
    by_name = (backend.token_to_id(token) for token in (*END_TOKENS, special_tokens.get("eos_token", "")))
    eos_ids = {i for i in (*by_name, *ends) if i is not None}
    if not eos_ids:
        raise TokenizerError("the tokenizer names no end-of-sequence token; replies could never end")
    special_ids = control | eos_ids
    return TextTokenizer(
        backend=backend,
        token_bytes=_token_bytes(backend, special_ids),
        special_ids=special_ids,
        eos_ids=tuple(sorted(eos_ids)),
        chat_template=chat_template,
        special_tokens=dict(special_tokens),
    )


def _check_byte_level(backend: tokenizers.Tokenizer) -> None:
    description = json.loads(backend.to_str())
    model = description["model"]["type"]
    if model != "BPE" or "ByteLevel" not in json.dumps(description["pre_tokenizer"]):
        raise TokenizerError(f"tokenizer model {model!r} without byte-level pre-tokens is not supported")


def _token_bytes(backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> tuple[bytes, ...]:
    """Raw bytes of every id, `b""` where an id is a control token or not in use."""
    to_byte = {character: byte for byte, character in _byte_to_unicode().items()}
    added = backend.get_added_tokens_decoder()
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        if i in special_ids:
            continue
        if i not in added and (strange := set(token) - set(to_byte)):
            raise TokenizerError(f"token {i} ({token!r}) is not spelled in bytes: it holds {min(strange)!r}")
        table[i] = added[i].content.encode() if i in added else bytes(to_byte[character] for character in token)
    return tuple(table)


@functools.cache
def _byte_to_unicode() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


@functools.cache
def _compile_template(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment.from_string(source)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.cache
def _load_tiny() -> TextTokenizer:
    folder = resources.files("envs_jax.text") / "tiny"
    backend = tokenizers.Tokenizer.from_str((folder / "tokenizer.json").read_text("utf-8"))
    template = (folder / "chat_template.jinja").read_text("utf-8")
    return _assemble(backend, template, {"eos_token": "<|endoftext|>"})


def _from_folder(folder: Path) -> TextTokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # `tokenizers` raises bare Exception for damaged files
        raise TokenizerError(f"{folder / 'tokenizer.json'}: {str(error).splitlines()[0]}") from error
    config = _read_json(folder / "tokenizer_config.json")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text("utf-8")
    named = {
        key: _content(config[key]) for key in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(key)
    }
    ends = _read_json(folder / "generation_config.json").get("eos_token_id")
    return _assemble(backend, template or CHATML_TEMPLATE, named, _as_ids(ends))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _as_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _read_gguf_header(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise TokenizerError(f"{path}: no such GGUF file")
    try:
        import gguf
    except ImportError as error:
        raise TokenizerError("reading GGUF files needs the 'gguf' extra: pip install 'jaxgrpo[gguf]'") from error
    try:
        reader = gguf.GGUFReader(path)
        return {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise TokenizerError(
            f"{path}: not a complete GGUF file ({str(error).splitlines()[0]}); download it again"
        ) from error


def _from_gguf_fields(fields: Mapping[str, Any], pre_tokenizer: str) -> TextTokenizer:
    tokens, kinds, merges = (fields[f"tokenizer.ggml.{part}"] for part in ("tokens", "token_type", "merges"))
    vocab = {t: i for i, (t, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _GGUF_UNUSED}
    backend = _byte_level_bpe(vocab, [tuple(merge.split(" ")) for merge in merges], pre_tokenizer)
    backend.add_special_tokens([_added(t, True) for t, k in zip(tokens, kinds, strict=True) if k == _GGUF_CONTROL])
    backend.add_tokens([_added(t, False) for t, k in zip(tokens, kinds, strict=True) if k == _GGUF_USER_DEFINED])
    ids = {key: fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot")}
    named = {f"{key}_token": tokens[i] for key, i in ids.items() if i is not None and key != "eot"}
    ends = [i for key, i in ids.items() if i is not None and key != "bos"]
    return _assemble(backend, fields.get("tokenizer.chat_template") or CHATML_TEMPLATE, named, ends)


def _read_ranks(path: Path) -> dict[bytes, int]:
    if not path.is_file():
        raise TokenizerError(f"{path}: no such ranks file")
    try:
        lines = (line.split() for line in path.read_bytes().splitlines() if line)
        return {base64.b64decode(token): int(rank) for token, rank in lines}
    except ValueError as error:
        raise TokenizerError(f"{path}: not a tiktoken ranks file: {error}") from error


def _merges_from_ranks(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merge that makes each token of more than one byte, in the order of their ranks."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = _byte_pair_parts(token, ranks, below=rank)
        if len(parts) != 2:
            raise TokenizerError(f"rank {rank}: token {token!r} is not a merge of two lower ranks")
        merges.append((parts[0], parts[1]))
    return merges


def _byte_pair_parts(token: bytes, ranks: Mapping[bytes, int], below: int) -> list[bytes]:
    """Byte-pair encoding of `token` with the ranks under `below` only."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        rank, i = min((ranks.get(parts[i] + parts[i + 1], below), i) for i in range(len(parts) - 1))
        if rank >= below:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts
