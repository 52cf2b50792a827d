"""What a run is made of: options with their meanings, the presets, and the numbers that reach the compiled step."""

import dataclasses
import difflib
import math
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class ConfigError(ValueError):
    """A mistake in the options: one line that says what was given, what is allowed and what to do."""


@dataclasses.dataclass(frozen=True)
class PlayConfig:
    """How episodes are played."""

    groups: int = 32
    """Groups of episodes an iteration; all episodes of a group share their start state."""
    group_size: int = 16
    """Episodes in a group."""
    group_randomness: Literal["all", "start"] = "all"
    """What the episodes of a group share: "all" (start state and the game's chance at every step) or "start" alone."""
    style: Literal["short", "full"] = "short"
    """Wording of the observation: "short" (bare board, few tokens) or "full" (sizes, objects, legend and board)."""
    shots: int = 0
    """Example turns in the prompt, which show the form of a reply; they are part of the shared prefix."""
    reply: Literal["action", "think"] = "action"
    """Form of a reply: "action" is <action>WORD</action>, "think" has <think>..</think><plan>..</plan> before it."""
    reply_limit: int = 8
    """Most tokens in a reply; a longer one is cut and unreadable."""
    constrain: bool = True
    """Sample only tokens that can still end in a readable reply."""
    temperature: float = 1.0
    """Sampling temperature in training; 0 is greedy."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample among the fewest tokens whose probabilities sum to p; 1 is off."""
    unreadable_penalty: float = 1.0
    """Taken off the reward of a step whose reply cannot be read (training only)."""
    action_length: Literal["tokens", "words", "none"] = "tokens"
    """What twosome divides an action's log-probability by: the "tokens" or "words" of its text, or nothing."""
    rollout_rows: int = 0
    """Rows the model plays at once; 0 is all. Finished episodes leave the work when this is smaller than all."""


@dataclasses.dataclass(frozen=True)
class LearnConfig:
    """How the policy learns from the episodes."""

    train_layers: str = "all"
    """Layers that are trained: "all" (with all else), or numbers and ranges from 0 up, such as 24-29, 24- or 0,8-9."""
    base_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type that the frozen model under adapters is kept in; "auto": float32 on CPUs, bfloat16 on accelerators."""
    normalise: Literal["std", "mean", "leave_one_out"] = "std"
    """Advantage within a group: (R - mean) / std, R - mean, or R - mean of the others."""
    train_fraction: float = 1.0
    """Share of an iteration's episodes that is trained on, drawn by absolute advantage; 1 is all."""
    alpha: float = 1.0
    """Exponent of |advantage| in the draw of episodes; 0 is uniform."""
    importance: Literal["none", "correct"] = "none"
    """Weights on drawn episodes: "correct" makes the policy-gradient term an unbiased estimate over all episodes."""
    step_weight: float = 1.0
    """Weight of gigpo's step advantage beside the episode's; 0 leaves the episode's alone."""
    step_discount: float = 0.95
    """Discount a step of the rewards to go that gigpo and step-grpo compare; 1 is none."""
    group_filter: float = 1.0
    """Share of the groups that is trained on, those whose returns spread most; 1 is all."""
    drop_equal_groups: bool = False
    """Leave groups whose returns are all equal out of the loss, its mean included."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: float = 0.0
    """Bound on ratio times advantage for negative advantages (3 is usual); 0 is off."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """What the ratio compares with: probabilities kept in play, or "recompute" (with the parameters of play)."""
    tis_cap: float = 0.0
    """Cap on the importance weight recomputed / kept probability of a token (2 is usual); 0 is no weight."""
    kl_beta: float = 0.0
    """Weight of the KL divergence to the model this run starts with (k3 estimate per token)."""
    entropy_bonus: float = 0.0
    """Weight of the policy's entropy per sampled token."""
    discount: float = 0.99
    """Discount a step of etpo, ppo-kl and poad, and a token of ntpo; 1 is none."""
    beta: float = 0.01
    """What etpo pays for a nat that the policy differs from the starting model, in units of the return."""
    reference_in_policy: bool = True
    """Whether etpo's policy loss knows the starting model; without, its optimum is softmax(Q / beta)."""
    etpo_as_released: bool = False
    """Losses and targets of etpo as in its published code, which are not those of its paper: an ablation."""
    critic: Literal["model", "raw", "head"] = "model"
    """Critic: a copy of the model ("model": Q is the change of its logits; "raw": Q is the logits), or "head" on it."""
    critic_width: int = 256
    """Width of the small network of --critic head."""
    polyak: float = 0.995
    """Share of etpo's target critic that stays when the critic has taken a step."""
    trace_decay: float = 0.95
    """Lambda of generalised advantage estimation, a step of ppo-kl, a token of poad and ntpo."""
    normalise_advantages: bool = True
    """Advantages of ppo-kl, poad and ntpo less their mean, over their standard deviation in the iteration."""
    value_clip: float = 0.2
    """Largest move of a value within an iteration that its loss counts, in units of the return."""
    target_kl: float = 0.02
    """Nats from which on the policy of ppo-kl, poad or ntpo takes no more steps in an iteration; 0 is off."""
    aggregate: Literal["token", "sequence", "episode", "constant"] = "token"
    """What the loss is a mean over."""
    passes: int = 1
    """Times the episodes of an iteration are gone through."""
    minibatches: int = 1
    """Optimiser steps in a pass."""
    micro_batch: int | Literal["auto"] = 256
    """Rows in one forward and backward; memory grows with it, results change by rounding alone; "auto": what fits."""


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (arXiv 2106.09685), trained in place of the model, which is frozen; options are --lora.NAME."""

    rank: int = 0
    """Inner size of the adapters; 0 trains the model itself."""
    alpha: float = 32.0
    """An adapter adds alpha / rank * B A to its matrix."""
    targets: str = "all-linear"
    """Matrices with an adapter: "all-linear", or names such as query,value (or q_proj,v_proj), without spaces."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Update rule and schedule."""

    update_rule: Literal["adamw", "lion"] = "adamw"
    """AdamW, or Lion, whose steps are all of one size: it takes a smaller learning rate."""

    learning_rate: float = 2e-3
    """Peak learning rate."""
    critic_learning_rate: float = 0.0
    """Peak learning rate of a critic; 0 is that of the policy."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up, towards 0 at the last iteration."""
    warmup: int = 0
    """Iterations of linear warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    adam_b1: float = 0.9
    """Decay of the first moment (Lion: of what is mixed into the gradient)."""
    adam_b2: float = 0.999
    """Decay of the second moment (Lion: of the first)."""
    adam_epsilon: float = 1e-8
    """Added to the root of the second moment."""
    gradient_clip: float = 1.0
    """Largest global norm of a gradient; 0 is off."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Where a run goes and how often it looks up."""

    out: str | None = None
    """Folder of the run, here or gs://BUCKET/FOLDER; by default runs/GAME-MODEL-seedS."""
    resume: bool = False
    """Go on from the last checkpoint in the folder."""
    max_seconds: float | None = None
    """Stop cleanly, with a checkpoint, after this many seconds of training."""
    checkpoint_every: int = 50
    """Iterations between checkpoints."""
    keep: int = 2
    """Checkpoints kept."""
    evaluate_every: int = 0
    """Iterations between evaluations on held-out episodes; 0 is only before and after."""
    evaluate_episodes: int = 1000
    """Held-out episodes in an evaluation."""
    evaluate_temperature: float = 0.5
    """Sampling temperature in evaluation; 0 is greedy."""
    tensorboard: bool = False
    """Write metrics and evaluations for TensorBoard too, into the folder's tensorboard/."""
    wandb: bool = False
    """Send metrics and evaluations to Weights & Biases too; WANDB_MODE=offline only writes them into wandb/."""
    export_episodes: int = 0
    """Iterations between those whose steps are written to episodes.jsonl: prompt, reply, reward, ...; 0 is never."""
    profile: int = 0
    """Iterations to profile, from the session's third: a trace and the seconds of the parts, in profile/."""
    mesh: str = "auto"
    """Devices that a run is divided among: sizes of data, fsdp and tensor such as fsdp=8; "auto": all, along fsdp."""
    compilation_cache: bool = True
    """Keep compiled programs between runs (in $JAX_COMPILATION_CACHE_DIR or ~/.cache/jaxgrpo)."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that makes a run: two runs with equal configurations and versions give equal metrics.

    Raises:
        ConfigError: a value is out of its range; the line names the option.
    """

    game: str = "frozen-lake"
    """Game or scenario."""
    algorithm: Literal["ms-grpo", "gigpo", "step-grpo", "etpo", "ppo-kl", "poad", "ntpo", "twosome"] = "ms-grpo"
    """Learning algorithm: compares episodes ("ms-grpo", "gigpo", "step-grpo") or learns a critic (the others)."""
    model: str = "tiny"
    """"tiny", "smollm2-135m", a folder of Hugging Face files, a .gguf file, or a hub name."""
    init_from: str | None = None
    """Folder of a run of the same model: begin with the parameters of its last checkpoint, all else fresh."""
    preset: str | None = None
    """Set of defaults; by default the one made for the model."""
    iterations: int = 150
    """Iterations of playing and learning."""
    seed: int = 0
    """Seed of weights, games and sampling."""
    play: PlayConfig = PlayConfig()
    learn: LearnConfig = LearnConfig()
    lora: LoRAConfig = LoRAConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        values = flatten(self)
        for name in _POSITIVE:
            if isinstance(values[name], int) and values[name] < 1:
                raise ConfigError(f"--{_option(name)} {values[name]}: must be at least 1.")
        for name in _NON_NEGATIVE:
            if not values[name] >= 0:
                raise ConfigError(f"--{_option(name)} {values[name]}: must be 0 or more.")
        if not 0 < values["top_p"] <= 1:
            raise ConfigError(f"--top-p {values['top_p']}: must be above 0 and at most 1 (1 is off).")
        if values["max_seconds"] is not None and not values["max_seconds"] > 0:
            raise ConfigError(f"--max-seconds {values['max_seconds']}: must be above 0.")
        if not values["adam_b1"] < 1 or not values["adam_b2"] < 1:
            raise ConfigError("--adam-b1 and --adam-b2 must be below 1.")
        if not values["lora.alpha"] > 0:
            raise ConfigError(f"--lora.alpha {values['lora.alpha']}: must be above 0.")
        if not 0 < values["train_fraction"] <= 1:
            raise ConfigError(f"--train-fraction {values['train_fraction']}: must be above 0 and at most 1 (1 is all).")
        if not 0 < values["group_filter"] <= 1:
            raise ConfigError(f"--group-filter {values['group_filter']}: must be above 0 and at most 1 (1 is all).")
        if not values["step_discount"] <= 1:
            raise ConfigError(f"--step-discount {values['step_discount']}: must be at most 1 (1 is no discount).")
        if values["tis_cap"] > 0 and values["old_logprobs"] != "recompute":
            raise ConfigError(
                f"--tis-cap {values['tis_cap']}: weighs recomputed against kept probabilities; "
                "give --old-logprobs recompute as well, or --tis-cap 0."
            )
        for name in ("discount", "trace_decay", "polyak"):
            if not values[name] <= 1:
                raise ConfigError(f"--{_option(name)} {values[name]}: must be at most 1.")
        _judge_algorithm(self.algorithm, values)
        if values["minibatches"] > self.trained:
            raise ConfigError(
                f"--minibatches {values['minibatches']}: more than the {self.trained} episodes trained on; give fewer."
            )

    @property
    def episodes(self) -> int:
        """Episodes played in an iteration."""
        return self.play.groups * self.play.group_size

    @property
    def kept_groups(self) -> int:
        """Groups in an iteration that the group filter keeps."""
        return max(1, round(self.learn.group_filter * self.play.groups))

    @property
    def trained(self) -> int:
        """Episodes trained on in an iteration: a share of those in the groups that are kept."""
        return max(1, round(self.learn.train_fraction * self.kept_groups * self.play.group_size))


def _judge_algorithm(algorithm: str, values: Mapping[str, Any]) -> None:
    """Refuse options that the algorithm does not know or cannot do with.

    Raises:
        ConfigError: there is one.
    """
    defaults = flatten(TrainConfig)
    for name, algorithms in _KNOWN_TO.items():
        if algorithm not in algorithms and values[name] != defaults[name]:
            raise ConfigError(
                f"--{_option(name)} {values[name]}: means nothing to --algorithm {algorithm}; "
                f"leave it out (it is {defaults[name]} then)."
            )
    if algorithm not in VALUE_ALGORITHMS:
        return
    if values["temperature"] == 0:
        raise ConfigError(f"--temperature 0: --algorithm {algorithm} needs chances; give a temperature above 0.")
    if algorithm == "etpo" and (values["top_k"] > 0 or values["top_p"] < 1):
        raise ConfigError(
            "--top-k, --top-p: --algorithm etpo learns the distribution that plays, over all tokens; leave them out."
        )
    if values["critic"] == "raw" and algorithm != "etpo":
        raise ConfigError(
            f"--critic raw: logits are a Q of tokens, and --algorithm {algorithm} learns values; give model or head."
        )


VALUE_ALGORITHMS = ("etpo", "ppo-kl", "poad", "ntpo", "twosome")
"""Algorithms with a critic; they train on all episodes, each for itself."""

_OF_GROUPS = ("ms-grpo", "gigpo", "step-grpo")
_OF_RATIOS = (*_OF_GROUPS, "ppo-kl", "poad", "ntpo", "twosome")
_OF_REPLIES = (*_OF_GROUPS, "etpo", "ppo-kl", "poad", "ntpo")
_PPO = ("ppo-kl", "poad", "ntpo", "twosome")

_KNOWN_TO: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("normalise", "train_fraction", "alpha", "importance", "group_filter"), _OF_GROUPS),
    **dict.fromkeys(("drop_equal_groups", "aggregate", "tis_cap"), _OF_GROUPS),
    "step_weight": ("gigpo",),
    "step_discount": ("gigpo", "step-grpo"),
    **dict.fromkeys(("clip_low", "clip_high", "dual_clip", "old_logprobs", "kl_beta", "entropy_bonus"), _OF_RATIOS),
    **dict.fromkeys(("beta", "polyak", "reference_in_policy", "etpo_as_released"), ("etpo",)),
    **dict.fromkeys(("discount", "critic", "critic_width", "critic_learning_rate"), VALUE_ALGORITHMS),
    **dict.fromkeys(("trace_decay", "normalise_advantages", "value_clip", "target_kl"), _PPO),
    # Where whole actions are chosen there is no reply to read.
    **dict.fromkeys(("reply", "constrain", "top_k", "top_p", "unreadable_penalty"), _OF_REPLIES),
    "action_length": ("twosome",),
}
"""The algorithms that look at an option; the options that are not here mean something to all."""

_POSITIVE = [
    "critic_width",
    "groups",
    "group_size",
    "reply_limit",
    "iterations",
    "passes",
    "minibatches",
    "micro_batch",
    "checkpoint_every",
    "keep",
    "evaluate_episodes",
]
_NON_NEGATIVE = [
    "seed",
    "lora.rank",
    "temperature",
    "top_k",
    "shots",
    "unreadable_penalty",
    "rollout_rows",
    "alpha",
    "step_weight",
    "step_discount",
    "clip_low",
    "clip_high",
    "dual_clip",
    "tis_cap",
    "kl_beta",
    "entropy_bonus",
    "discount",
    "beta",
    "polyak",
    "trace_decay",
    "value_clip",
    "target_kl",
    "learning_rate",
    "critic_learning_rate",
    "warmup",
    "weight_decay",
    "adam_b1",
    "adam_b2",
    "adam_epsilon",
    "gradient_clip",
    "evaluate_every",
    "evaluate_temperature",
    "export_episodes",
    "profile",
]

# The options that make a run's results: a resumed run must agree in all of them. The others say where and how long.
_NOT_RESULTS = {f.name for f in dataclasses.fields(RunConfig)} | {"iterations", "preset"}

PRESETS: dict[str, dict[str, Any]] = {
    # Found by trial, see docs/results.md: a bonus that keeps the policy from settling on a path that ignores the board.
    "tiny": {
        "train_fraction": 0.25,
        "entropy_bonus": 0.05,
        "learning_rate": 1e-3,
        "adam_b2": 0.99,
        "rollout_rows": 128,
        "micro_batch": 64,
        "iterations": 200,
        "evaluate_every": 20,
    },
    "smollm2": {
        "style": "full",
        "shots": 2,
        "train_fraction": 0.5,
        "constrain": False,
        "reply_limit": 12,
        "groups": 4,
        "group_size": 8,
        "learning_rate": 1e-5,
        "micro_batch": 8,
        "evaluate_episodes": 16,
        "iterations": 100,
        "checkpoint_every": 10,
    },
    # Follow-up work by the first author of arXiv 2508.10839 trains Qwen2.5-3B-Instruct with these values.
    "paper": {
        "style": "full",
        "constrain": False,
        "groups": 2,
        "group_size": 16,
        "reply_limit": 256,
        "temperature": 1.25,
        "learning_rate": 1e-6,
        "weight_decay": 0.01,
        "gradient_clip": 1.0,
        "entropy_bonus": 0.001,
        "iterations": 600,
        "micro_batch": 8,
        "evaluate_episodes": 50,
        "checkpoint_every": 25,
    },
}


_QUALIFIED = ("lora",)
"""Sections whose options carry the section's name, --lora.rank: alone they would be unclear or taken."""


# Nothing is compared within groups, so every episode begins somewhere else.
_VALUES = {"train_fraction": 1.0, "groups": 32, "group_size": 1}
# Entropy bonus of the sources.
_PPO_VALUES = {**_VALUES, "entropy_bonus": 1e-4}
# Values found by trial: a discount that makes short ways worth it, a bonus that keeps the policy looking around, and
# small first steps, for Adam's first are of full size whatever the gradient and move the policy by a nat.
_PPO_TINY = {"groups": 256, "minibatches": 4, "discount": 0.95, "entropy_bonus": 0.02, "warmup": 10}

# What an algorithm needs, above the preset of the model; then what the two together need.
ALGORITHM_PRESETS: dict[tuple[str, str | None], dict[str, Any]] = {
    **{(name, None): _PPO_VALUES for name in ("ppo-kl", "poad", "ntpo")},
    **{(name, "tiny"): _PPO_TINY for name in _PPO},
    ("twosome", None): {**_PPO_VALUES, "constrain": True},
    # The gradient clip of the source.
    ("etpo", None): {**_VALUES, "entropy_bonus": 0.0, "gradient_clip": 10.0},
    # Q has to be good to a fraction of beta, which takes the critic many steps. And what this model begins as is random
    # and not worth staying near: it may all but exclude a move.
    ("etpo", "tiny"): {
        "groups": 256,
        "minibatches": 24,
        "discount": 0.9,
        "beta": 0.03,
        "reference_in_policy": False,
        "polyak": 0.95,
        "learning_rate": 2e-4,
        "critic_learning_rate": 1e-3,
        "adam_b2": 0.999,
        "warmup": 10,
    },
}


def default_preset(model: str) -> str:
    """The preset made for a model: "tiny", "smollm2", or "paper" for every other model."""
    return {"tiny": "tiny", "smollm2-135m": "smollm2"}.get(model, "paper")


def flatten(config: Any) -> dict[str, Any]:
    """All options of a (nested) configuration as one flat mapping; option names are unique across its sections."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        flat |= _of_section(field.name, flatten(value)) if dataclasses.is_dataclass(value) else {field.name: value}
    return flat


def _of_section(section: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A section's options by their flat names."""
    return {f"{section}.{name}": value for name, value in options.items()} if section in _QUALIFIED else dict(options)


def with_options(config: TrainConfig, options: Mapping[str, Any], *, source: str = "") -> TrainConfig:
    """A configuration with some options replaced, each given by its flat name (dashes or underscores).

    Raises:
        ConfigError: an option does not exist (the nearest that does is named) or its value is out of range.
    """
    known = flatten(config)
    options = {name.replace("-", "_"): value for name, value in options.items()}
    for name in options:
        if name not in known:
            raise ConfigError(f"{source}unknown option {_option(name)!r}.{nearest(name, known, option=True)}")
    return _replace(config, options)


def resolve(
    options: Mapping[str, Any] | None = None, *, toml: Path | None = None, resumed: TrainConfig | None = None
) -> TrainConfig:
    """The configuration that presets, a TOML file and given options make, each overriding the one before.

    A resumed run's own options stand where otherwise the preset made for the model does.

    Raises:
        ConfigError: an unknown preset or option, an unreadable file, or a value out of range.
    """
    options = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    from_file = read_toml(toml) if toml else {}
    chosen = {**from_file, **options}
    preset = chosen.get("preset")
    if preset is None and resumed is None:
        preset = default_preset(str(chosen.get("model", TrainConfig.model)))
    if preset is not None and preset not in PRESETS:
        raise ConfigError(
            f"--preset {preset}: unknown; allowed are {', '.join(PRESETS)}.{nearest(str(preset), PRESETS)}"
        )
    # Presets meet the user's options before any value is judged: a preset alone need not fit the user's sizes.
    if preset:
        algorithm = str(chosen.get("algorithm", (resumed or TrainConfig).algorithm))
        of_algorithm = [ALGORITHM_PRESETS.get((algorithm, name), {}) for name in (None, preset)]
        merged = {**PRESETS[preset], **of_algorithm[0], **of_algorithm[1], **chosen, "preset": preset}
    else:
        merged = chosen
    if resumed is not None and merged.get("micro_batch") == "auto":
        merged = {name: value for name, value in merged.items() if name != "micro_batch"}  # it was chosen at the start
    source = f"{toml}: " if toml and from_file.keys() - options.keys() else ""
    return with_options(resumed or TrainConfig(), merged, source=source)


def read_toml(path: Path) -> dict[str, Any]:
    """Options from a TOML file, flat or in the sections play, learn, lora, optimizer and run.

    Raises:
        ConfigError: the file is missing or is not TOML.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read as TOML ({error}).") from None
    return from_tables(tables)


def from_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Options by flat name from a mapping whose sections may be nested (as in TOML files and config.json)."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        flat |= _of_section(name, value) if isinstance(value, dict) else {name: value}
    return {name.replace("-", "_"): value for name, value in flat.items()}


def from_text(kind: type, texts: Mapping[str, str]) -> dict[str, Any]:
    """Options given as text, each turned into the type that its field in the (nested) dataclass `kind` declares.

    Raises:
        ConfigError: a text is no such value; the line names the option.
    """
    kinds = field_types(kind)
    return {name: _convert(name, kinds[name], _parse(kinds[name], text)) for name, text in texts.items()}


def field_types(kind: Any) -> dict[str, Any]:
    """Declared type of every option of a (nested) dataclass, by flat name."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        declared: Any = field.type
        # The command line annotates sections with how they are shown.
        section = declared.__origin__ if hasattr(declared, "__metadata__") else declared
        if dataclasses.is_dataclass(section):
            flat |= _of_section(field.name, field_types(section))
        else:
            flat[field.name] = declared
    return flat


def differing_results(a: TrainConfig, b: TrainConfig) -> list[str]:
    """Names of the options that shape results and differ between two configurations."""
    one, other = flatten(a), flatten(b)
    # A decaying learning rate depends on where the run ends; otherwise a run may be made longer.
    free = _NOT_RESULTS - ({"iterations"} if one["schedule"] != "constant" else set())
    return [name for name in one if name not in free and one[name] != other[name]]


def nearest(name: str, known: Iterable[str], *, option: bool = False) -> str:
    """A sentence that proposes the nearest known name, or nothing where none is near."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    if not match:
        return ""
    return f" Did you mean {('--' + _option(match[0])) if option else match[0]!r}?"


def _option(name: str) -> str:
    return name.replace("_", "-")


def _parse(kind: Any, text: str) -> Any:
    """The number or None that a text stands for, where `kind` allows one; else the text itself."""
    kinds = getattr(kind, "__args__", (kind,))
    if type(None) in kinds and text == "None":
        return None
    for number in (int, float):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                continue
    return text


def _replace(config: Any, options: Mapping[str, Any], section: str = "") -> Any:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        (name,) = _of_section(section, {field.name: value})
        if dataclasses.is_dataclass(value):
            changes[field.name] = _replace(value, options, field.name)
        elif name in options:
            changes[field.name] = _convert(name, field.type, options[name])
    return dataclasses.replace(config, **changes)


_KIND_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "None"}


def _convert(name: str, kind: Any, value: Any) -> Any:
    """A value checked against the type its option declares (ints pass for floats)."""
    allowed = getattr(kind, "__args__", None)
    if allowed and getattr(kind, "__origin__", None) is Literal:
        if value not in allowed:
            raise ConfigError(
                f"--{_option(name)} {value}: allowed are {', '.join(map(str, allowed))}.{nearest(str(value), allowed)}"
            )
        return value
    words = [word for k in allowed or () if typing.get_origin(k) is Literal for word in typing.get_args(k)]
    if isinstance(value, str) and value in words:
        return value
    kinds = [k for k in allowed or (kind,) if typing.get_origin(k) is not Literal]
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not any(isinstance(value, k) and (k is bool or not isinstance(value, bool)) for k in kinds):
        names = " or ".join([*(_KIND_NAMES[k] for k in kinds), *words])
        raise ConfigError(f"--{_option(name)} {value!r}: must be {names}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"--{_option(name)} {value}: must be finite.")
    return value


# Not checked as they are built (`no_type_check`): JAX rebuilds pytrees around things that are not arrays.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HyperParameters:
    """Every number that does not change a shape, as traced scalars: changing one never recompiles.

    Whether a term is on at all is decided beside it, in `Switches`, so that what is off costs nothing.
    """

    learning_rate: Float[Array, ""]
    warmup: Float[Array, ""]
    iterations: Float[Array, ""]
    weight_decay: Float[Array, ""]
    adam_b1: Float[Array, ""]
    adam_b2: Float[Array, ""]
    adam_epsilon: Float[Array, ""]
    gradient_clip: Float[Array, ""]
    temperature: Float[Array, ""]
    top_p: Float[Array, ""]
    unreadable_penalty: Float[Array, ""]
    alpha: Float[Array, ""]
    step_weight: Float[Array, ""]
    step_discount: Float[Array, ""]
    clip_low: Float[Array, ""]
    clip_high: Float[Array, ""]
    dual_clip: Float[Array, ""]
    tis_cap: Float[Array, ""]
    kl_beta: Float[Array, ""]
    entropy_bonus: Float[Array, ""]
    discount: Float[Array, ""]
    beta: Float[Array, ""]
    polyak: Float[Array, ""]
    trace_decay: Float[Array, ""]
    value_clip: Float[Array, ""]
    target_kl: Float[Array, ""]
    critic_learning_rate: Float[Array, ""]

    @classmethod
    def from_config(cls, config: TrainConfig) -> "HyperParameters":
        """The traced numbers of a configuration, as float32 scalars."""
        values = flatten(config)
        values["critic_learning_rate"] = values["critic_learning_rate"] or values["learning_rate"]
        return cls(**{f.name: jnp.float32(values[f.name]) for f in dataclasses.fields(cls)})  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class Switches:
    """What is compiled in at all; flipping one recompiles."""

    kl: bool
    entropy: bool
    dual_clip: bool
    tis: bool
    gradient_clip: bool
    top_p: bool
    target_kl: bool

    @classmethod
    def from_config(cls, config: TrainConfig) -> "Switches":
        """The switches a configuration needs."""
        return cls(
            kl=config.learn.kl_beta > 0,
            entropy=config.learn.entropy_bonus > 0,
            dual_clip=config.learn.dual_clip > 0,
            tis=config.learn.tis_cap > 0,
            gradient_clip=config.optimizer.gradient_clip > 0,
            top_p=config.play.top_p < 1,
            target_kl=config.learn.target_kl > 0,
        )
