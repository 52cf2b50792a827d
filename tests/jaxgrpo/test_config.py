import dataclasses
import json
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxgrpo import config as config_module
from jaxgrpo.config import (
    PRESETS,
    VALUE_ALGORITHMS,
    ConfigError,
    HyperParameters,
    LoRAConfig,
    Switches,
    TrainConfig,
    differing_results,
    flatten,
    from_tables,
    from_text,
    resolve,
    with_options,
)


def _toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "options.toml"
    path.write_text(text)
    return path


def test_option_names_are_unique_and_every_option_is_explained():
    source = Path(config_module.__file__).read_text()
    names = []

    def walk(kind):
        for field in dataclasses.fields(kind):
            if dataclasses.is_dataclass(field.type):
                walk(field.type)
            else:
                names.append(f"lora.{field.name}" if kind is LoRAConfig else field.name)
                assert re.search(rf'^    {field.name}: .*\n    """', source, re.MULTILINE), field.name

    walk(TrainConfig)
    assert len(names) == len(set(names))
    assert set(flatten(TrainConfig())) == set(names)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid(preset):
    config = resolve({"preset": preset})
    values = flatten(config)
    assert values["preset"] == preset
    for name, value in PRESETS[preset].items():
        assert values[name] == value


@pytest.mark.parametrize("algorithm", VALUE_ALGORITHMS)
@pytest.mark.parametrize("preset", PRESETS)
def test_with_a_critic_every_episode_is_trained_on_and_begins_elsewhere(preset, algorithm):
    config = resolve({"preset": preset, "algorithm": algorithm})
    assert config.play.group_size == 1
    assert config.trained == config.episodes == config.play.groups > 1


def test_command_line_over_file_over_preset(tmp_path):
    toml = _toml(tmp_path, 'model = "smollm2-135m"\ngroups = 6\n[optimizer]\nlearning-rate = 3e-5\n')
    config = resolve({"groups": 7}, toml=toml)
    assert config.preset == "smollm2"
    assert config.play.group_size == 8  # preset
    assert config.optimizer.learning_rate == 3e-5  # file
    assert config.play.groups == 7  # command line


@pytest.mark.parametrize("text", ["[lora]\nrank = 4\nalpha = 8", "lora.rank = 4\nlora.alpha = 8", '"lora.rank" = 4'])
def test_options_that_carry_the_name_of_their_section(tmp_path, text):
    config = resolve({"lora.alpha": 6, "alpha": 0.5}, toml=_toml(tmp_path, text))
    assert config.lora == LoRAConfig(rank=4, alpha=6.0)
    assert config.learn.alpha == 0.5
    assert resolve(from_tables(dataclasses.asdict(config))) == config
    assert differing_results(config, resolve({})) == ["alpha", "lora.rank", "lora.alpha"]


def test_a_preset_alone_need_not_fit(tmp_path):
    assert resolve({"preset": "smollm2", "groups": 32, "train_fraction": 0.5}).trained == 128
    assert resolve({"groups": 1, "group_size": 2}).trained == 1
    assert resolve({"groups": 8, "group_size": 4, "group_filter": 0.25, "train_fraction": 0.5}).trained == 4
    with pytest.raises(ConfigError, match=r"--train-fraction 1.5: must be above 0 and at most 1"):
        resolve({"train_fraction": 1.5})


def test_a_resumed_run_keeps_its_options():
    run = resolve({"learning_rate": 0.5, "groups": 3})
    assert resolve({"resume": True, "iterations": 9}, resumed=run) == with_options(
        run, {"resume": True, "iterations": 9}
    )
    assert resolve({"preset": "paper"}, resumed=run).play.groups == PRESETS["paper"]["groups"]
    assert resolve({"micro_batch": "auto"}, resumed=run) == run  # what was chosen at the start


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("32", 32)])
def test_a_number_or_a_word(tmp_path, text, value):
    assert from_text(TrainConfig, {"micro_batch": text}) == {"micro_batch": value}
    toml = _toml(tmp_path, f"[learn]\nmicro-batch = {json.dumps(value)}")
    assert resolve(toml=toml).learn.micro_batch == value


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"group_sise": 3}, r"unknown option 'group-sise'\. Did you mean '?--group-size'?\?"),
        ({"preset": "papier"}, r"--preset papier: unknown; allowed are tiny, smollm2, paper\. Did you mean 'paper'\?"),
        ({"group_size": 0}, r"--group-size 0: must be at least 1\."),
        ({"reply_limit": 0}, r"--reply-limit 0: must be at least 1\."),
        ({"keep": 0}, r"--keep 0: must be at least 1\."),
        ({"temperature": -0.1}, r"--temperature -0\.1: must be 0 or more\."),
        ({"temperature": float("nan")}, r"--temperature nan: must be finite\."),
        ({"top_p": 0}, r"--top-p 0\.0: must be above 0 and at most 1"),
        ({"max_seconds": 0}, r"--max-seconds 0\.0: must be above 0\."),
        ({"adam_b2": 1.0}, r"--adam-b1 and --adam-b2 must be below 1\."),
        ({"groups": 1.5}, r"--groups 1\.5: must be a whole number\."),
        ({"groups": True}, r"--groups True: must be a whole number\."),
        ({"constrain": 1}, r"--constrain 1: must be true or false\."),
        ({"out": 3}, r"--out 3: must be text or None\."),
        ({"normalise": "stdd"}, r"--normalise stdd: allowed are std, mean, leave_one_out\. Did you mean 'std'\?"),
        ({"group_filter": 0}, r"--group-filter 0\.0: must be above 0 and at most 1 \(1 is all\)\."),
        ({"step_discount": 1.5}, r"--step-discount 1\.5: must be at most 1 \(1 is no discount\)\."),
        ({"step_weight": -1}, r"--step-weight -1\.0: must be 0 or more\."),
        ({"beta": 0.5}, r"--beta 0\.5: means nothing to --algorithm ms-grpo; leave it out \(it is 0\.01 then\)\."),
        ({"step_weight": 0.5}, r"--step-weight 0\.5: means nothing to --algorithm ms-grpo"),
        ({"tis_cap": 2}, r"--tis-cap 2\.0: .*; give --old-logprobs recompute as well, or --tis-cap 0\."),
        ({"lora.rank": -1}, r"--lora\.rank -1: must be 0 or more\."),
        ({"lora.alpha": 0}, r"--lora\.alpha 0\.0: must be above 0\."),
        ({"lora_rank": 3}, r"unknown option 'lora-rank'\. Did you mean '?--lora\.rank'?\?"),
        ({"base_dtype": "float16"}, r"--base-dtype float16: allowed are auto, float32, bfloat16\. Did you mean"),
        (
            {"algorithm": "gipo"},
            r"--algorithm gipo: allowed are ms-grpo, .*, etpo, ppo-kl, poad, ntpo, twosome\. Did you mean 'gigpo'\?",
        ),
        ({"micro_batch": 0}, r"--micro-batch 0: must be at least 1\."),
        ({"micro_batch": "all"}, r"--micro-batch 'all': must be a whole number or auto\."),
        ({"minibatches": 999}, r"--minibatches 999: more than the 128 episodes trained on"),
    ],
)
def test_wrong_options_are_one_line(options, line):
    with pytest.raises(ConfigError, match=f"^{line}") as caught:
        resolve(options)
    assert "\n" not in str(caught.value)


def test_wrong_files_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"^--config \S+: no such file\.$"):
        resolve(toml=tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"^--config \S+: cannot be read as TOML \(.+\)\.$"):
        resolve(toml=_toml(tmp_path, "groups = = 3"))
    with pytest.raises(ConfigError, match=r"^\S+options\.toml: unknown option 'gruops'\. Did you mean '?--groups"):
        resolve(toml=_toml(tmp_path, "gruops = 3"))


def test_text_becomes_what_the_option_declares():
    texts = {"groups": "3", "learning_rate": "1e-4", "max_seconds": "None", "out": "5", "style": "full"}
    expected = {"groups": 3, "learning_rate": 1e-4, "max_seconds": None, "out": "5", "style": "full"}
    found = from_text(TrainConfig, texts)
    assert found == expected
    assert [type(found[name]) for name in texts] == [type(expected[name]) for name in texts]
    for name, text in {"groups": "3.0", "learning_rate": "fast", "max_seconds": "x", "style": "long"}.items():
        with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} '?{text}'?: "):
            from_text(TrainConfig, {name: text})


def test_what_shapes_results():
    run = resolve({})
    free = {"iterations": 9, "out": "x", "resume": True, "keep": 7, "evaluate_every": 3, "max_seconds": 5.0}
    assert differing_results(run, with_options(run, free)) == []
    assert differing_results(run, with_options(run, {"model": "x", "clip_low": 0.1})) == ["model", "clip_low"]
    # A decaying learning rate looks at the last iteration.
    linear = resolve({"schedule": "linear"})
    assert differing_results(linear, with_options(linear, {"iterations": 9})) == ["iterations"]


def test_numbers_and_switches():
    config = resolve(
        {"learning_rate": 0.25, "kl_beta": 0.1, "top_p": 0.9, "gradient_clip": 0, "entropy_bonus": 0, "iterations": 150}
    )
    hp = HyperParameters.from_config(config)
    assert (hp.learning_rate, hp.kl_beta, hp.iterations) == (0.25, jnp.float32(0.1), 150)
    assert {leaf.dtype for leaf in vars(hp).values()} == {jnp.dtype("float32")}
    assert Switches.from_config(config) == Switches(
        kl=True, entropy=False, dual_clip=False, tis=False, gradient_clip=False, top_p=True, target_kl=True
    )
