"""Plans: slices by name, models without weights, bounds of loops, and a plan checked against a count of its own."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from envs_jax.text.tokenizer import TextTokenizer
from jaxgrpo import hlo
from jaxgrpo.build import build
from jaxgrpo.cli import main
from jaxgrpo.config import ConfigError, resolve
from jaxgrpo.model import weights
from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.files import read_json
from jaxgrpo.model.transformer import declare
from jaxgrpo.plan import Assumed, Plan, _Programs, _with_prompt, bound_of, find_model, plan
from jaxgrpo.stopping import Exit
from jaxgrpo.topologies import CHIPS, SHAPES, Topology, memory_in
from tests.jaxgrpo.model.published import PUBLISHED

TINY = Path(weights.__file__).with_name("tiny.json")
SMALL = {
    **{"groups": 2, "group_size": 4, "train_fraction": 1.0, "rollout_rows": 0, "micro_batch": 4},
    **{"constrain": False, "reply_limit": 6, "entropy_bonus": 0.0},
}


@pytest.mark.parametrize(
    ("name", "found", "chips"),
    [
        ("v5e:4x4", "v5e:4x4", 16),
        ("v5litepod-16", "v5e:4x4", 16),
        ("v5e-1", "v5e:1x1", 1),
        ("v6e-8", "v6e:2x4", 8),
        ("v5p-8", "v5p:2x2x1", 4),  # cores
        ("v5p-32", "v5p:2x2x4", 16),
    ],
)
def test_slices_by_both_names(name, found, chips):
    slice_ = Topology.find(name)
    assert (slice_.name, slice_.chips, slice_.chip) == (found, chips, CHIPS[found[:3]])


def test_shapes_have_their_number_of_chips():
    for shapes in SHAPES.values():
        for chips, shape in shapes.items():
            assert math.prod(map(int, shape.split("x"))) == chips


@pytest.mark.parametrize("name", ["v5p-4", "v7:2x2", "v5e:16x4", ""])
def test_no_such_slice(name):
    with pytest.raises(ConfigError, match=rf"--topology {name}: unknown; allowed are v5e:1x1, "):
        Topology.find(name)


def test_without_the_compiler_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    assert main(["plan", "--topology", "v5e:2x2"]) == Exit.USER_ERROR
    printed = capsys.readouterr()
    assert printed.err.startswith("jaxgrpo: plan: the compiler for TPUs is not installed")
    assert printed.err.endswith("run: pip install 'jaxgrpo[tpu]'\n") and printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("RESOURCE_EXHAUSTED: ... Used 16.73G of 15.75G hbm. Exceeded hbm capacity by 1003.1M.", 16.73 * 2**30),
        ("the total memory required for HLO temporaries (480.00M) exceeds available HBM (15.75G).", 480 * 2**20),
        ("out of cheese", None),
    ],
)
def test_what_a_refused_program_needs(message, size):
    assert memory_in(message) == size


@pytest.mark.parametrize(
    ("place", "turns"),
    [
        ("jit(rollout)/play/steps/while", 8),
        ("jit(rollout)/play/steps/while/body/reply/while", 255),
        ("jit(update)/while/body/gradient/micro_batches/while", 4),
        ("jit(update)/targets/micro_batches/while", 3),
        ("jit(update)/micro_batches/while", 2),
        ("jit(rollout)/play/steps/while/body/jit(_reset)/while", None),
    ],
)
def test_bounds_of_loops_by_the_scopes_they_are_written_in(place, turns):
    bounds = {
        **{"steps": 8, "reply": 255, "micro_batches": 2},
        **{"gradient/micro_batches": 4, "targets/micro_batches": 3},
    }
    assert bound_of(hlo.Loop(place, ()), bounds) == turns


def test_published_models_are_found_without_the_hub(monkeypatch):
    def hub(*_, **__):
        raise AssertionError("asked the hub")

    monkeypatch.setattr("jaxgrpo.model.weights._download", hub)
    name, cpu = "Qwen/Qwen2.5-3B-Instruct", jax.devices("cpu")[:1]
    model, source = find_model(resolve({"model": name}), cpu, Assumed())
    sizes = {place: math.prod(one.shape) for place, one in declare(model.config).items()}
    assert sum(sizes.values()) == PUBLISHED["Qwen2.5-3B-Instruct"][1]
    assert model.config.compute_dtype == "bfloat16"
    assert "Qwen's" in source or "built-in" in source
    llama, source = find_model(resolve({"model": "meta-llama/Llama-3.1-8B-Instruct"}), cpu, Assumed())
    assert "built-in" in source and llama.tokenizer.vocab_size == TextTokenizer.tiny().vocab_size
    with pytest.raises(ConfigError, match=r"--model Qwen/Qwen2.5-4B.*Did you mean 'Qwen/Qwen"):
        find_model(resolve({"model": "Qwen/Qwen2.5-4B-Instruct"}), cpu, Assumed())


def test_a_tokenizer_can_be_given(tmp_path):
    TextTokenizer.tiny().save_pretrained(tmp_path)
    given = Assumed(tokenizer=str(tmp_path))
    model, source = find_model(resolve({"model": "Qwen/Qwen3-0.6B"}), jax.devices("cpu")[:1], given)
    assert source == str(tmp_path) and model.tokenizer.vocab_size == TextTokenizer.tiny().vocab_size


@pytest.fixture(scope="module")
def here() -> Plan:
    """A plan for the device that is here, whose compiler is at hand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Topology, "devices", lambda self: jax.devices("cpu")[:1])
        return plan(resolve(SMALL), Topology.find("v5e-1"), assumed=Assumed(prompt_tokens=20, steps=3))


def products(jaxpr, turns, scope=""):
    """FLOPs of the products in a jaxpr, loops times their turns: an independent count, of what was traced."""
    total = 0
    for equation in jaxpr.eqns:
        inside = f"{scope}/{equation.source_info.name_stack}"
        name, inner = equation.primitive.name, jaxprs_in_params(equation.params)
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        times = equation.params["length"] if name == "scan" else 1
        if name == "while":
            times = next((n for part, n in turns.items() if inside.split("/")[-1] == part), 1)
        total += times * sum(products(one, turns, inside) for one in inner)
    return total


def test_a_plan_counts_what_is_traced(here):
    devices = jax.devices("cpu")[:1]
    config = resolve(SMALL)
    experiment = _with_prompt(build(config, model=find_model(config, devices, Assumed())[0]), 20)
    state, fixed = experiment.abstract()
    hp = experiment.abstract_hyperparameters()
    step = experiment.train_step
    episodes = jax.eval_shape(step.rollout, state, fixed, hp)
    turns = {"steps": 3, "reply": 5, "micro_batches": 2 * 4 * 3 / 4}
    rollout = products(jax.make_jaxpr(step.rollout)(state, fixed, hp).jaxpr, turns)
    update = products(jax.make_jaxpr(step.update)(state, episodes, fixed, hp).jaxpr, turns)
    assert here.parts["rollout"].cost.flops == pytest.approx(rollout, rel=0.03)
    assert here.parts["update"].cost.flops == pytest.approx(update, rel=0.03)


def test_what_a_plan_says_of_memory_and_time(here):
    size = 4 * here.parameters
    assert here.resident["trained parameters"] == size
    assert here.resident["optimiser"] == pytest.approx(2 * size, rel=0.001)
    assert (here.prompt_tokens, here.steps, here.reply_tokens, here.episodes, here.rows) == (20, 3, 6, 8, 24)
    for part in here.parts.values():
        assert part.memory["arguments"] >= sum(here.resident.values())
        assert part.needed == sum(part.memory.values()) < CHIPS["v5e"].memory and part.fits
        cost, chip = part.cost, CHIPS["v5e"]
        assert part.seconds == max(cost.passes / chip.flops, cost.bytes / chip.bandwidth)
    assert here.seconds == sum(part.seconds for part in here.parts.values())
    assert here.played_tokens == 8 * 3 * 6 and here.tokens_per_second == here.played_tokens / here.seconds
    assert here.fits and not here.advice()
    assert json.loads(json.dumps(here.as_json()))["parts"]["update"]["cost"]["flops"] == here.parts["update"].cost.flops


def resident(**options):
    devices = jax.devices("cpu")[:1]
    config = resolve({**SMALL, **options})
    experiment = build(config, model=find_model(config, devices, Assumed())[0])
    return _Programs(experiment, devices, learns=True).resident()


def test_every_part_of_the_state_is_named():
    size = 4 * sum(math.prod(one.shape) for one in declare(ModelConfig.from_hf(read_json(TINY))).values())
    with_critic = resident(algorithm="etpo", minibatches=1)
    assert with_critic["critic"] == pytest.approx(2 * size, rel=0.001)  # and its target
    assert with_critic["optimiser"] == pytest.approx(4 * size, rel=0.001)
    assert with_critic["reference"] == size
    adapters = resident(**{"lora.rank": 2})
    assert adapters["frozen parameters"] == pytest.approx(size / 2, rel=0.02)  # in bfloat16, but for norms and biases
    assert adapters["optimiser"] == pytest.approx(2 * adapters["trained parameters"], rel=0.001)
    assert "reference" not in adapters and "critic" not in adapters


def test_the_command_prints_the_plan_and_fails_where_it_does_not_fit(here, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Topology, "devices", lambda self: jax.devices("cpu")[:1])
    monkeypatch.setattr("jaxgrpo.plan.plan", lambda *_, **__: here)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    words = ["plan", "--topology", "v5e-1", "--json", str(tmp_path / "plan.json")]
    assert main(words) == Exit.DONE
    page = capsys.readouterr().out
    for text in ("tiny", "20 tokens", "trained parameters", "rollout: in all", "update: temporaries", "It fits into"):
        assert text in page
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is True
    refused = dataclasses.replace(here.parts["update"], fits=False, needed=2e11, memory={}, cost=None, seconds=None)
    tight = dataclasses.replace(here, parts={**here.parts, "update": refused})
    monkeypatch.setattr("jaxgrpo.plan.plan", lambda *_, **__: tight)
    assert main(words) == Exit.DOES_NOT_FIT
    page = capsys.readouterr().out
    assert "the update needs 200.00 GB" in page and "--micro-batch" in page


@pytest.mark.tpu
def test_a_plan_for_tpus(tmp_path):
    """The whole command, in a process of its own: four chips, and one that is too small."""

    def run(*words):
        command = [sys.executable, "-m", "jaxgrpo", "plan", "--reply-limit", "12", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])

    done = run("--topology", "v5e-4", "--json", str(tmp_path / "plan.json"))
    assert done.returncode == Exit.DONE, done.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["mesh"]["fsdp"] == 4 and found["fits"]
    kinds = {traffic["kind"] for traffic in found["parts"]["update"]["cost"]["collectives"]}
    assert "all-gather" in kinds
    size = ["--model", "Qwen/Qwen2.5-7B-Instruct", "--part", "rollout"]
    tight = run("--topology", "v5e-1", *size)
    assert tight.returncode == Exit.DOES_NOT_FIT, tight.stderr
    assert "It does not fit into 16.91 GB a chip: the rollout needs" in tight.stdout
    assert np.isfinite(found["seconds"])
