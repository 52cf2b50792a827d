import dataclasses
import json
import random

import gguf
import pytest
import tokenizers
from tokenizers import normalizers

from envs_jax.text.tiny import build
from envs_jax.text.tokenizer import TextTokenizer, TokenizerError, chat_messages

TEXTS = [
    "<|im_start|>user\n P F F F\n F H F H<|im_end|>\n",
    "<think>12 + 345 = 357</think><plan>\n\n go  left </plan><action>left</action>",
    "You're at (1, 2).  It's 'red' \t\r\n   \n x",
    "naïve café 你好 🙂 \x00\x7f ſ",
]


def _random_texts(count: int) -> list[str]:
    generator = random.Random(1)
    alphabet = list(" \n\t'aTs12,.<>_|é好") + ["<|im_end|>", "  ", "'s"]
    return ["".join(generator.choices(alphabet, k=generator.randrange(30))) for _ in range(count)]


def test_token_bytes_spell_the_text(tokenizer):
    for text in TEXTS + _random_texts(200):
        ids = tokenizer.encode(text)
        spelled = b"".join(
            tokenizer.decode([i]).encode() if i in tokenizer.special_ids else tokenizer.token_bytes[i] for i in ids
        )
        # (All these texts are composed, so Qwen's NFC changes nothing.)
        assert spelled == text.encode()
        assert tokenizer.decode(ids) == text


def test_control_tokens_have_no_bytes_and_plain_ones_have(tokenizer):
    assert all(tokenizer.token_bytes[i] == b"" for i in tokenizer.special_ids)
    silent = {i for i, spelled in enumerate(tokenizer.token_bytes) if spelled == b""}
    assert silent == tokenizer.special_ids
    assert len(tokenizer.token_bytes) == tokenizer.vocab_size


def test_end_of_sequence_is_a_set(tiny, smollm2, qwen):
    assert qwen.eos_ids == (151643, 151645)
    assert [qwen.decode([i]) for i in qwen.eos_ids] == ["<|endoftext|>", "<|im_end|>"]
    assert smollm2.eos_ids == (0, 2)
    assert [tiny.decode([i]) for i in tiny.eos_ids] == ["<|endoftext|>", "<|im_end|>"]
    for tokenizer in (tiny, smollm2, qwen):
        assert tokenizer.special_ids.issuperset(tokenizer.eos_ids)


def test_vocabulary_sizes(tiny, smollm2, qwen):
    assert (tiny.vocab_size, smollm2.vocab_size, qwen.vocab_size) == (512, 49152, 151665)


def test_tiny_has_single_tokens_for_cells_actions_and_tags(tiny):
    words = [" F", " H", " G", " P", "left", "down", "right", "up", "\n", *build.PLAIN_TOKENS, *build.CONTROL_TOKENS]
    assert {word: len(tiny.encode(word)) for word in words} == dict.fromkeys(words, 1)
    action = tiny.encode("<action>")[0]
    assert tiny.token_bytes[action] == b"<action>"
    assert action not in tiny.special_ids


def test_tiny_is_what_its_script_makes(tiny):
    assert json.loads(build.train().to_str()) == json.loads(tiny.backend.to_str())


def test_qwen_equals_transformers(qwen, transformers_qwen):
    assert len(transformers_qwen) == qwen.vocab_size
    for text in TEXTS + _random_texts(300):
        assert qwen.encode(text) == transformers_qwen.encode(text, add_special_tokens=False)


def test_smollm2_equals_transformers(smollm2, transformers_smollm2):
    # Transformers' GGUF reader leaves out SmolLM's digit splitting, which shows only beside white space.
    for text in [text for text in TEXTS + _random_texts(300) if not any(c.isdigit() for c in text)]:
        assert smollm2.encode(text) == transformers_smollm2.encode(text, add_special_tokens=False)


def test_chat_template_equals_transformers(smollm2, qwen, transformers_smollm2, transformers_qwen):
    messages = [*chat_messages("Be brief.", " P F\n"), {"role": "assistant", "content": "<action>up</action>"}]
    for ours, theirs in ((smollm2, transformers_smollm2), (qwen, transformers_qwen)):
        for add_generation_prompt in (False, True):
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
            assert ours.apply_chat_template(messages, add_generation_prompt) == expected


def test_tiny_chat_template(tiny):
    messages = [*chat_messages("Go.", " P\n"), {"role": "assistant", "content": "up"}, {"role": "user", "content": "x"}]
    expected = "Go.<|im_start|> P\n<|im_end|>up<|endoftext|><|im_start|>x<|im_end|>"
    assert tiny.apply_chat_template(messages) == expected


def _with_template(tokenizer: TextTokenizer, template: str) -> TextTokenizer:
    return TextTokenizer(
        tokenizer.backend,
        tokenizer.token_bytes,
        tokenizer.special_ids,
        tokenizer.eos_ids,
        template,
        {"bos_token": "<s>"},
    )


def test_chat_frame(tiny):
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}!"
    assert _with_template(tiny, template).chat_frame("Hello", [" a ", ""]) == ("<s>[system]Hello[user]", "!")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", "alters the user message ' a'"),
        ("{{ messages[1].content }}{{ messages[1].content }}", "shows the user message 2 times"),
        ("{{ messages[0].content }}", "shows the user message 0 times"),
        ("{{ raise_exception('no system role') }}", "refuses messages.*no system role"),
        ("{% for m in messages %}{{ m.content", "refuses messages"),
    ],
)
def test_chat_frame_refuses_templates_that_alter_messages(tiny, template, message):
    with pytest.raises(TokenizerError, match=message):
        _with_template(tiny, template).chat_frame("S", [" a"])


def _write_gguf(path, tokenizer: TextTokenizer, pre: str, unused: int = 0, **changes):
    rules = json.loads(tokenizer.backend.to_str())
    control = {token["content"] for token in rules["added_tokens"] if token["special"]}
    added = {token["content"] for token in rules["added_tokens"]}
    vocab = sorted(tokenizer.backend.get_vocab().items(), key=lambda item: item[1])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocab] + [f"[PAD{len(vocab) + i}]" for i in range(unused)])
    kinds = [3 if token in control else 4 if token in added else 1 for token, _ in vocab]
    writer.add_token_types(kinds + [5] * unused)
    if changes.get("merges", True):
        writer.add_token_merges([" ".join(merge) for merge in rules["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_ids[0])
    writer.add_chat_template(tokenizer.chat_template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_gguf_with_the_same_rules_is_the_same_tokenizer(tmp_path, tiny):
    _write_gguf(tmp_path / "model.gguf", tiny, "qwen2", unused=3)
    loaded = TextTokenizer.from_gguf(tmp_path / "model.gguf")
    assert loaded.token_bytes == tiny.token_bytes
    assert (loaded.special_ids, loaded.eos_ids) == (tiny.special_ids, tiny.eos_ids)
    for text in TEXTS + _random_texts(100):
        assert loaded.encode(text) == tiny.encode(text)


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "llama3", "llama-v3"])
def test_gguf_pre_tokenizers_equal_transformers(tmp_path, tiny, pre):
    from transformers import AutoTokenizer

    _write_gguf(tmp_path / "model.gguf", tiny, pre)
    ours = TextTokenizer.from_gguf(tmp_path / "model.gguf")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf").backend_tokenizer
    for text in ["1234567 + 89 = 12", "I'LL, they'll", "x\n\n  y\r\n", *TEXTS, *_random_texts(100)]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
        assert ours.backend.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)


def test_llama3_takes_whole_words_without_asking_the_merges(tmp_path, tiny):
    rules = json.loads(tiny.backend.to_str())
    rules["model"]["merges"] = [merge for merge in rules["model"]["merges"] if "".join(merge) != "left"]
    backend = tokenizers.Tokenizer.from_str(json.dumps(rules))
    cut = dataclasses.replace(tiny, backend=backend)
    assert len(cut.encode("left")) > 1
    for pre, count in (("llama-bpe", 1), ("qwen2", len(cut.encode("left")))):
        _write_gguf(tmp_path / "model.gguf", cut, pre)
        assert len(TextTokenizer.from_gguf(tmp_path / "model.gguf").encode("left")) == count


def test_saved_tokenizer_is_the_same_to_us_and_to_transformers(tmp_path, tokenizer):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = TextTokenizer.from_pretrained(tmp_path)
    for name in ("token_bytes", "special_ids", "eos_ids", "chat_template", "special_tokens"):
        assert getattr(loaded, name) == getattr(tokenizer, name)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS + _random_texts(50):
        assert loaded.encode(text) == tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)
    messages = chat_messages("Be brief.", " P F\n")
    expected = tokenizer.apply_chat_template(messages)
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected
    assert theirs.eos_token == tokenizer.special_tokens["eos_token"]


def test_incomplete_gguf_tokenizers_are_refused(tmp_path, tiny):
    _write_gguf(tmp_path / "model.gguf", tiny, "qwen2", merges=False)
    with pytest.raises(TokenizerError, match="the header has no tokenizer.ggml.merges"):
        TextTokenizer.from_gguf(tmp_path / "model.gguf")
    rules = json.loads(tiny.backend.to_str())
    merged = {part for merge in rules["model"]["merges"] for part in merge}
    lone = next(token for token in rules["model"]["vocab"] if len(token) == 1 and token not in merged)
    number = rules["model"]["vocab"].pop(lone)
    rules["model"]["vocab"]["名"] = number
    foreign = dataclasses.replace(tiny, backend=tokenizers.Tokenizer.from_str(json.dumps(rules)))
    _write_gguf(tmp_path / "model.gguf", foreign, "qwen2")
    with pytest.raises(TokenizerError, match=f"token {number} .*is not spelled in bytes"):
        TextTokenizer.from_gguf(tmp_path / "model.gguf")


def test_gguf_tokenizers_that_contradict_themselves_are_refused_in_one_line(tmp_path, tiny):
    path = tmp_path / "model.gguf"
    _write_gguf(path, tiny, "qwen2")
    data = path.read_bytes()
    at = data.index(b"l e", data.index(b"tokenizer.ggml.merges"))
    path.write_bytes(data[:at] + b"l \x00" + data[at + 3 :])
    with pytest.raises(
        TokenizerError, match=r"the tokenizer in the header is damaged \(.*out of vocabulary\)"
    ) as error:
        TextTokenizer.from_gguf(path)
    assert "\n" not in str(error.value)


def test_gguf_of_unknown_kind_is_refused_by_name(tmp_path, tiny):
    _write_gguf(tmp_path / "pre.gguf", tiny, "deepseek-llm")
    with pytest.raises(TokenizerError, match=r"pre-tokenizer 'deepseek-llm' is not supported; allowed: .*smollm"):
        TextTokenizer.from_gguf(tmp_path / "pre.gguf")
    _write_gguf(tmp_path / "model.gguf", tiny, "qwen2", model="llama")
    with pytest.raises(TokenizerError, match="tokenizer model 'llama' is not supported"):
        TextTokenizer.from_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize("size", [0, 3, 100, 100_000, 1_000_000])
def test_truncated_gguf_is_refused_in_one_line(tmp_path, smollm2_file, size):
    cut = tmp_path / "cut.gguf"
    with smollm2_file.open("rb") as whole:
        cut.write_bytes(whole.read(size))
    with pytest.raises(TokenizerError, match="cut.gguf: not a complete GGUF file") as error:
        TextTokenizer.from_gguf(cut)
    assert "\n" not in str(error.value)


def test_missing_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(TokenizerError, match="no such GGUF file"):
        TextTokenizer.from_gguf(tmp_path / "none.gguf")
    with pytest.raises(TokenizerError, match="no such ranks file"):
        TextTokenizer.from_tiktoken(tmp_path / "none.tiktoken")
    (tmp_path / "few.tiktoken").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(TokenizerError, match="2 ranks; only Qwen's"):
        TextTokenizer.from_tiktoken(tmp_path / "few.tiktoken")
    (tmp_path / "bad.tiktoken").write_text("hello\n")
    with pytest.raises(TokenizerError, match="not a tiktoken ranks file"):
        TextTokenizer.from_tiktoken(tmp_path / "bad.tiktoken")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="tokenizer.json"):
        TextTokenizer.from_pretrained(tmp_path)
    with pytest.raises(TokenizerError, match="no tokenizer at 'nobody/nothing'"):
        TextTokenizer.from_pretrained("nobody/nothing")


def test_folder_of_a_checkpoint(tmp_path, tiny):
    tiny.backend.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ messages[0].content }}{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [509, 3]}))
    loaded = TextTokenizer.from_pretrained(tmp_path)
    assert loaded.eos_ids == (3, 509, 511)
    assert loaded.apply_chat_template([{"role": "user", "content": "x"}]) == "x<|im_end|>"
    assert loaded.encode(TEXTS[0]) == tiny.encode(TEXTS[0])
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    assert TextTokenizer.from_pretrained(tmp_path).apply_chat_template([{"role": "user", "content": "x"}]) == "x?"


def test_tokenizers_that_are_not_byte_level_are_refused(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    backend.normalizer = normalizers.NFC()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="'WordLevel' without byte-level"):
        TextTokenizer.from_pretrained(tmp_path)
