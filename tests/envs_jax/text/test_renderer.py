import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers, trainers

from envs_jax.text.cuts import cut_template
from envs_jax.text.renderer import Renderer, RenderError, compile_template
from envs_jax.text.template import Slot, Template
from envs_jax.text.tokenizer import PRE_TOKENIZERS, TextTokenizer

CELLS = (" F", " H", " G", " P")
FRAME = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
NASTY = (
    *(" ", "  ", "\n", "\n\n", " \n", "\t", "\r", "a", "b", " a", "th", "'", "r", "e", "s", "'s", "'re", "T"),
    *("1", "12", "3", " 4", ".", ", ", "(", "_", " _", "-", "|", " F", ""),
    *("<", ">", "<|", "im_end|>", "<|im_end|>", "<action>", "action", "</"),
)


def _host_ids(renderer: Renderer, values) -> list[int]:
    """What the renderer should give, by host arithmetic over its tables: no compilation for each template."""
    chosen = renderer._first_alternative + (np.append(values, 0)[renderer._slots] * renderer._strides).sum(-1)
    spans = zip(renderer._starts[chosen], renderer._lengths[chosen], strict=True)
    ids = [i for start, length in spans for i in renderer._tokens[start : start + length].tolist()]
    return [*renderer.prefix_ids.tolist(), *ids]


def _all_values(template: Template) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(slot.alternatives)) for slot in template.slots)))


def _assert_exact(template: Template, tokenizer: TextTokenizer, before: str, after: str) -> Renderer:
    """Compiles, and checks all values by host arithmetic."""
    renderer = compile_template(template, tokenizer, before=before, after=after)
    for values in _all_values(template):
        text = before + template.text(values) + after
        assert _host_ids(renderer, values) == tokenizer.encode(text), repr(text)
    return renderer


def _assert_exact_in_jit(template: Template, tokenizer: TextTokenizer, before: str, after: str, samples) -> Renderer:
    renderer = compile_template(template, tokenizer, before=before, after=after)
    all_ids, lengths = jax.jit(jax.vmap(renderer))(jnp.asarray(samples, jnp.int32))
    for values, ids, length in zip(samples, np.asarray(all_ids), np.asarray(lengths), strict=True):
        padding = renderer.max_tokens - length
        whole = [*renderer.prefix_ids.tolist(), *ids[padding:].tolist()]
        assert whole == tokenizer.encode(before + template.text(values) + after), repr(template.text(values))
        assert renderer.min_tokens <= length <= renderer.max_tokens
        assert not ids[:padding].any()
    return renderer


def _pieces(template: Template, tokenizer: TextTokenizer) -> list[tuple[int, ...]]:
    """Slots of each piece that has any: ((0,), (1,)) is cut between the two, ((0, 1),) is not."""
    return [piece.slots for piece in cut_template(template, tokenizer, 20_000) if piece.slots]


@pytest.fixture(scope="session", params=sorted(set(PRE_TOKENIZERS) - {"gpt-2"}))
def nasty_tokenizer(request, tmp_path_factory) -> TextTokenizer:
    """A tokenizer trained on nasty text, so that nearly every pre-token of its own is one token of its own."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = PRE_TOKENIZERS[request.param]()
    backend.decoder = tokenizers.decoders.ByteLevel()
    if request.param == "qwen2":
        backend.normalizer = normalizers.NFC()
    generator = random.Random(0)
    corpus = ["".join(generator.choices(NASTY, k=8)) for _ in range(5000)]
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(corpus, trainer)
    backend.add_tokens([AddedToken(token, normalized=False) for token in ("<action>", "</action>")])
    backend.add_tokens([AddedToken("<a", normalized=True)])
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
    folder = tmp_path_factory.mktemp(request.param)
    backend.save(str(folder / "tokenizer.json"))
    return TextTokenizer.from_pretrained(folder)


def _random_template(generator: random.Random) -> Template:
    def text(lengths):
        return "".join(generator.choices(NASTY, k=generator.choice(lengths)))

    parts: list[str | Slot] = []
    for i in range(generator.randint(2, 7)):
        if generator.random() < 0.4:
            parts.append(text((0, 1, 2, 3)))
        else:
            count = generator.randint(1, 5)
            parts.append(Slot(f"s{i}", tuple(text((0, 1, 1, 1, 2, 3)) for _ in range(count))))
    return Template((*parts, Slot("last", ("", text((1, 2))))))


def _check_random_templates(tokenizer: TextTokenizer, count: int) -> None:
    frames = [FRAME, ("x ", ""), ("", ""), ("", "<|im_end|>"), ("'", " 1"), ("\n", "\n")]
    compiled = cut = 0
    for seed in range(count):
        generator = random.Random(seed)
        template, (before, after) = _random_template(generator), generator.choice(frames)
        try:
            renderer = compile_template(template, tokenizer, before=before, after=after)
        except RenderError:
            continue
        compiled += 1
        cut += len(renderer._slots)
        for _ in range(8):
            values = [generator.randrange(size) for size in renderer.slot_sizes]
            text = before + template.text(values) + after
            assert _host_ids(renderer, values) == tokenizer.encode(text), (seed, text)
    # Were everything refused or merged into one piece, the test would show nothing.
    assert compiled > 0.9 * count
    assert cut > 2 * compiled


def test_random_templates_are_exact_or_refused(nasty_tokenizer):
    _check_random_templates(nasty_tokenizer, 250)


def test_random_templates_with_real_tokenizers(tokenizer):
    _check_random_templates(tokenizer, 120)


def test_random_templates_in_jit(nasty_tokenizer):
    for seed in range(2):
        generator = random.Random(1000 + seed)
        template = _random_template(generator)
        samples = [[generator.randrange(len(s.alternatives)) for s in template.slots] for _ in range(30)]
        _assert_exact_in_jit(template, nasty_tokenizer, *FRAME, samples)


def test_board_cells_are_cut_one_by_one_and_exact(tokenizer):
    rows = ["Grid:\n", *[Slot(f"a{i}", CELLS) for i in range(3)], "\n", *[Slot(f"b{i}", CELLS) for i in range(3)]]
    template = Template(tuple(rows))
    assert _pieces(template, tokenizer) == [(i,) for i in range(6)]
    generator = random.Random(0)
    samples = [generator.choices(range(4), k=6) for _ in range(100)]
    renderer = _assert_exact_in_jit(template, tokenizer, *FRAME, samples)
    assert renderer.min_tokens == renderer.max_tokens == 7 + len(tokenizer.encode(FRAME[1]))
    assert renderer.prefix_ids.tolist() == tokenizer.encode(FRAME[0] + "Grid:\n")


UNSAFE = {
    "underscore before a newline": Template((Slot("cell", (" _", " F")), Slot("end", ("\n", "\n\n")), "x")),
    "letters beside letters": Template((Slot("left", ("th", "b", "th")), Slot("right", ("e", "", ".")))),
    "double spaces": Template((Slot("gap", (" ", "  ", "")), Slot("word", (" a", "b", "\n")), "c")),
    "contraction": Template(("x", Slot("quote", ("'", "x")), Slot("r", ("r", "")), Slot("e", ("e", " e")))),
    "white space before the end": Template(("a", Slot("end", (" ", "  ", "\n", " \n ")))),
    "added token across a cut": Template((Slot("open", ("<", "<act", "a")), Slot("name", ("action", "ion", "")), ">")),
    "control token across a cut": Template(("a<", Slot("bar", ("|", "b")), "im_end", Slot("close", ("|>", "")))),
    "empty alternatives": Template(
        (Slot("a", ("x", "")), Slot("b", ("", "1")), Slot("c", ("", "y")), Slot("d", (" ", "")))
    ),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_cuts_are_merged_and_exact(name, tokenizer):
    _assert_exact(UNSAFE[name], tokenizer, *FRAME)


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_cuts_with_every_pre_tokenizer(name, nasty_tokenizer):
    _assert_exact(UNSAFE[name], nasty_tokenizer, "x", "")


def test_underscore_before_a_newline_fuses_on_qwen(qwen, smollm2):
    template = Template((Slot("cell", (" _", " F")), "\n", Slot("next", (" _", " F"))))
    assert qwen.encode(" _") + qwen.encode("\n") != qwen.encode(" _\n")
    merged = [piece.texts for piece in cut_template(template, qwen, 100) if 0 in piece.slots]
    assert merged == [(" _\n", " F\n")]
    assert [piece.texts for piece in cut_template(template, smollm2, 100) if 0 in piece.slots] == [(" _", " F")]


def test_digits_that_group_by_three_are_merged():
    """Llama 3 groups up to three digits; Qwen and SmolLM take them one by one."""
    tokenizer = _small_llama()
    numbers = tuple(str(i) for i in range(0, 1001, 91))
    side_by_side = Template((Slot("tens", ("1", "12", "123")), Slot("ones", ("4", "56", "")), "."))
    assert tokenizer.encode("1") + tokenizer.encode("2") != tokenizer.encode("12")
    assert _pieces(side_by_side, tokenizer) == [(0, 1)]
    _assert_exact(side_by_side, tokenizer, "n", "")
    apart = Template(("(", Slot("x", numbers), ", ", Slot("y", numbers), ")"))
    assert _pieces(apart, tokenizer) == [(0,), (1,)]
    _assert_exact(apart, tokenizer, "n", "")
    # Three digits are full: what follows starts afresh.
    assert _pieces(Template((Slot("full", ("123", "456")), Slot("more", ("7", "89")))), tokenizer) == [(0,), (1,)]


def _small_llama() -> TextTokenizer:
    from envs_jax.text.tokenizer import _assemble

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = PRE_TOKENIZERS["llama-bpe"]()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([f"n{i}" for i in range(1001)], trainer)
    backend.add_special_tokens(["<|eot_id|>"])
    return _assemble(backend, "", {})


def test_merges_past_the_limit_are_refused_with_the_slots_name(tokenizer):
    letters = Template(tuple(Slot(f"letter {i}", ("a", "b")) for i in range(16)))
    with pytest.raises(RenderError, match=r"slot 'letter 0\+letter 1.*cannot be cut from 'letter 14'.*32,768"):
        compile_template(letters, tokenizer, before="x ", after="")


def test_too_many_continuations_are_refused_with_the_slots_name(tokenizer):
    gaps = Template((Slot("word", ("a",)), *(Slot(f"gap {i}", (" ", "\n")) for i in range(20))))
    with pytest.raises(RenderError, match=r"slot 'word': more than 20,000 continuations up to slot 'gap 14'"):
        compile_template(gaps, tokenizer, before="x ", after="")


def test_template_without_slots_is_refused(tiny):
    with pytest.raises(RenderError, match="no slots"):
        compile_template(Template(("text",)), tiny, before="", after="")


@pytest.mark.parametrize("text", ["é", "\x00", "\x1c", "\u00a0", "🙂"])
def test_text_outside_the_proof_is_refused(tiny, text):
    with pytest.raises(RenderError, match="here: .* has characters outside printable ASCII"):
        compile_template(Template((Slot("here", ("a", text)),)), tiny, before="", after="")
    with pytest.raises(RenderError, match="static text: "):
        compile_template(Template((Slot("here", ("a",)),)), tiny, before=text, after="")


def _changed(tokenizer: TextTokenizer, change) -> TextTokenizer:
    from envs_jax.text.tokenizer import _assemble

    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    change(backend)
    return _assemble(backend, "", {})


def _set(name, value):
    return lambda backend: setattr(backend, name, value)


def _add(token: AddedToken):
    return lambda backend: backend.add_tokens([token])


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_LOOK_BEHIND = pre_tokenizers.Split(tokenizers.Regex(r"(?<=a)b|."), behavior="isolated")
OUTSIDE_THE_PROOF = {
    "lower-casing": (_set("normalizer", normalizers.Lowercase()), "normaliser 'Lowercase'"),
    "prepending": (
        _set("normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("_")])),
        "normaliser 'Prepend'",
    ),
    "look-behind": (_set("pre_tokenizer", pre_tokenizers.Sequence([_LOOK_BEHIND, _BYTES])), "cuts can be proven"),
    "prefix space": (_set("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)), "cuts can be proven"),
    "no pattern": (_set("pre_tokenizer", _BYTES), "cuts can be proven"),
    "stripping token": (_add(AddedToken("<x>", lstrip=True, normalized=False)), "'<x>' looks at its neighbours"),
    "whole-word token": (_add(AddedToken("xyz", single_word=True, normalized=False)), "'xyz' looks at its neighbours"),
    "space token": (_add(AddedToken("  ", normalized=False)), "begins with white space"),
}


@pytest.mark.parametrize("name", OUTSIDE_THE_PROOF)
def test_tokenizers_outside_the_proof_are_refused(name, tiny):
    change, message = OUTSIDE_THE_PROOF[name]
    with pytest.raises(RenderError, match=message):
        compile_template(Template((Slot("a", (" x", " y")),)), _changed(tiny, change), before="", after="")


def test_bpe_dropout_is_refused(tiny):
    backend = tokenizers.Tokenizer.from_str(tiny.backend.to_str().replace('"dropout":null', '"dropout":0.5'))
    tokenizer = TextTokenizer(backend, tiny.token_bytes, tiny.special_ids, tiny.eos_ids, "", {})
    with pytest.raises(RenderError, match="dropout=0.5"):
        compile_template(Template((Slot("a", (" x", " y")),)), tokenizer, before="", after="")


def test_ragged_observations_are_padded_on_the_left(tiny):
    template = Template(("Apples:", Slot("first", ("", " a", " at least one apple")), Slot("second", ("", " b")), "."))
    renderer = _assert_exact_in_jit(template, tiny, "x", "<|im_end|>", _all_values(template))
    render = jax.jit(renderer)
    lengths = [int(render(jnp.asarray(values))[1]) for values in ([0, 0], [1, 1], [2, 1])]
    assert lengths == sorted(set(lengths))
    assert (lengths[0], lengths[2]) == (renderer.min_tokens, renderer.max_tokens)


def test_merged_slots_index_their_product_in_order(qwen):
    template = Template((Slot("a", ("a", "b", "c")), Slot("b", ("x", "y")), Slot("c", ("", "z", "zz", "q"))))
    assert _pieces(template, qwen) == [(0, 1, 2)]
    _assert_exact_in_jit(template, qwen, "(", ")", _all_values(template))


def _operations(renderer: Renderer) -> list[str]:
    jaxpr = jax.make_jaxpr(renderer)(jnp.zeros(len(renderer.slot_sizes), jnp.int32))
    inner = [e.params["jaxpr"].jaxpr.eqns if "jaxpr" in e.params else [e] for e in jaxpr.jaxpr.eqns]
    return [equation.primitive.name for equation in itertools.chain.from_iterable(inner)]


def _board(size: int, cells=CELLS) -> Template:
    rows = [[Slot(f"{row} {column}", cells) for column in range(size)] + ["\n"] for row in range(size)]
    return Template(tuple(itertools.chain.from_iterable(rows)))


def test_program_does_not_grow_with_the_board(tiny):
    for cells in (CELLS, (" F", " _", " at least")):
        small, large = (
            _operations(compile_template(_board(size, cells), tiny, before="x", after=".")) for size in (3, 9)
        )
        assert small == large
        assert len(large) < 60


def test_equal_lengths_need_no_running_sum(tiny):
    fixed = _operations(compile_template(_board(4), tiny, before="x", after="."))
    ragged = _operations(compile_template(_board(4, (" F", " at least")), tiny, before="x", after="."))
    assert "cumsum" not in fixed
    assert "cumsum" in ragged
    assert not any("scatter" in name for name in fixed + ragged)


def test_equal_slots_share_their_tokens(tiny):
    renderer = compile_template(_board(9), tiny, before="x", after=".")
    assert len(renderer._tokens) == len(CELLS) + 3  # the cells, a newline, and the last newline with the full stop


def test_one_trace_serves_all_values_and_vmap(tiny):
    renderer = compile_template(_board(4), tiny, before="x", after=".")
    jit_alone = jax.jit(renderer)
    traces = []

    @jax.jit
    def render(values):
        traces.append(None)
        return jax.vmap(renderer)(values)

    for seed in range(3):
        values = np.random.default_rng(seed).integers(0, 4, (5, 16)).astype(np.int32)
        ids, lengths = render(values)
        alone = [jit_alone(row)[0] for row in values]
        np.testing.assert_array_equal(ids, alone)
        assert ids.dtype == lengths.dtype == jnp.int32
    assert len(traces) == 1
