"""Ahead-of-time plans: a run's rollout and update compiled for a TPU that is not here, their memory and time.

The programs are the real ones. What they need is known exactly, what they take is bounded from below by what the chips
can do at most (a roofline): see `docs/tpu.md`.
"""

import dataclasses
import importlib.util
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from envs_jax.text.tokenizer import TextTokenizer
from jaxgrpo import hlo
from jaxgrpo.beginning import NamedModel, find_tokenizer
from jaxgrpo.build import Experiment, build
from jaxgrpo.config import ConfigError, TrainConfig, nearest
from jaxgrpo.fitting import memory_parts, try_compile
from jaxgrpo.model import weights
from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.published import PUBLISHED
from jaxgrpo.model.sharding import MESH_AXES, on_mesh, whole_rows
from jaxgrpo.model.transformer import declare
from jaxgrpo.topologies import Chip, Topology, memory_in

Part = Literal["rollout", "update"]

_QWEN_RANKS = ("dashscope", "resources/qwen.tiktoken")
"""Package and file with the tokenizer of Qwen2 and Qwen2.5."""


@dataclasses.dataclass(frozen=True)
class Assumed:
    """What a plan takes as given beside a run's options.

    Attributes:
        tokenizer: a folder with `tokenizer.json`, a GGUF file or Qwen's ranks file; None looks for the model's own.
        prompt_tokens: of the shared prompt; 0 is the game's own.
        reply_tokens: of a reply; 0 is the limit.
        steps: of an episode; 0 is the game's limit.
    """

    tokenizer: str | None = None
    prompt_tokens: int = 0
    reply_tokens: int = 0
    steps: int = 0


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What one half of the step needs and takes, on one chip.

    Attributes:
        fits: whether it fits into a chip's memory.
        needed: bytes in all; None if the compiler refused and did not say.
        memory: bytes by part; empty if the compiler refused.
        cost: of one run; None if the compiler refused.
        seconds: at least, see `Plan`; None if the compiler refused.
        bound: what takes longest, `flops`, `memory` or `network`.
        loops: how often each loop is taken to run whose length is data, by its place in the program.
        compile_seconds: that compiling took here.
    """

    fits: bool
    needed: float | None
    memory: Mapping[str, float]
    cost: hlo.Cost | None = None
    seconds: float | None = None
    bound: str = ""
    loops: Mapping[str, int] = dataclasses.field(default_factory=dict)
    compile_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run on a slice that is not here. Bytes and FLOPs are those of one chip, in one iteration.

    A half's seconds are the larger of FLOPs by the chip's peak and bytes by its bandwidth, and what collectives send by
    the two links that serve an axis of the torus; nothing of the network is taken to hide behind the rest.

    Attributes:
        topology: the slice.
        mesh: sizes of its axes.
        model: its name.
        parameters: of the model, adapters not counted.
        tokenizer: where numbers of tokens come from.
        prompt_tokens: of the shared prompt.
        observation_tokens: of an observation at most.
        reply_tokens: of a reply, as assumed.
        steps: of an episode, as assumed.
        episodes: in an iteration.
        rows: that are trained in an iteration.
        resident: bytes on a chip that stay from iteration to iteration, by part.
        parts: the halves that were compiled.
    """

    topology: Topology
    mesh: Mapping[str, int]
    model: str
    parameters: int
    tokenizer: str
    prompt_tokens: int
    observation_tokens: int
    reply_tokens: int
    steps: int
    episodes: int
    rows: int
    resident: Mapping[str, float]
    parts: Mapping[Part, Compiled]

    @property
    def fits(self) -> bool:
        """Whether all that was compiled fits."""
        return all(part.fits for part in self.parts.values())

    @property
    def played_tokens(self) -> int:
        """Reply tokens in an iteration."""
        return self.episodes * self.steps * self.reply_tokens

    @property
    def seconds(self) -> float | None:
        """Of an iteration, or of the half that was compiled; None if one of them was refused."""
        found = [part.seconds for part in self.parts.values()]
        return None if None in found else sum(seconds for seconds in found if seconds is not None)

    @property
    def tokens_per_second(self) -> float | None:
        """Reply tokens played in a second of the whole, at most."""
        return self.played_tokens / self.seconds if self.seconds else None

    def advice(self) -> list[str]:
        """What to change where it does not fit, likeliest first."""
        chip, state = self.topology.chip, sum(self.resident.values())
        found = []
        for name, part in self.parts.items():
            if part.fits:
                continue
            if state > 0.6 * chip.memory:
                found.append(f"more chips, or adapters (--lora.rank 16): the state alone takes {_gb(state)}")
            elif name == "rollout":
                found.append("a smaller --rollout-rows, or more of --mesh tensor=N, which divides what decoding reads")
            else:
                found.append("a smaller --micro-batch, or more chips")
        return list(dict.fromkeys(found))

    def as_json(self) -> dict[str, Any]:
        """Everything, with what follows from it."""
        return {
            **dataclasses.asdict(self),
            "fits": self.fits,
            "seconds": self.seconds,
            "played_tokens": self.played_tokens,
            "tokens_per_second": self.tokens_per_second,
            "advice": self.advice(),
        }


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


# The experiment without its weights


def find_model(config: TrainConfig, devices: Sequence[Any], assumed: Assumed) -> tuple[NamedModel, str]:
    """The model that a configuration names, for TPUs, from its configuration alone; and where its tokenizer is from.

    Published models are known by their hub names without the hub. Where no tokenizer of theirs is here, the built-in
    one stands in for it: its vocabulary is small, so prompts come out longer than they are.

    Raises:
        ConfigError: a hub name that is not in the table.
        WeightsError: no such file.
        TokenizerError: the tokenizer that was given cannot be read.
    """
    name = config.model
    if name in PUBLISHED:
        path, shape = Path(name), ModelConfig.from_hf(PUBLISHED[name], _COMPUTE)
    elif "/" in name and not Path(name).exists():
        raise ConfigError(
            f"--model {name}: not a file here, and not one of the models that plan knows by name: "
            f"{', '.join(PUBLISHED)}.{nearest(name, PUBLISHED)}"
        )
    else:
        path = weights.resolve_model(name)
        shape = weights.read_config(path, compute_dtype=_COMPUTE)
    tokenizer, source = _tokenizer(name, path, shape, assumed.tokenizer)
    return NamedModel.of(config, path, shape, tokenizer, devices), source


_COMPUTE = "bfloat16"


def _tokenizer(name: str, path: Path, shape: ModelConfig, given: str | None) -> tuple[TextTokenizer, str]:
    """A tokenizer for the model, and a few words on it."""
    if given is not None:
        return _read_tokenizer(Path(given)), given
    if name not in PUBLISHED:
        return find_tokenizer(name, path), "the model's own"
    package, file = _QWEN_RANKS
    spec = importlib.util.find_spec(package) if shape.architecture == "qwen2" else None
    if spec is not None and spec.submodule_search_locations:
        return TextTokenizer.from_tiktoken(Path(spec.submodule_search_locations[0]) / file), f"Qwen's, of {package}"
    return TextTokenizer.tiny(), "the built-in one, which makes more tokens of a text; give --tokenizer"


def _read_tokenizer(path: Path) -> TextTokenizer:
    if path.suffix == ".tiktoken":
        return TextTokenizer.from_tiktoken(path)
    return find_tokenizer("", path)


def _with_prompt(experiment: Experiment, tokens: int) -> Experiment:
    """The experiment with a shared prompt of so many tokens, whatever they say."""
    policy = experiment.policy
    longer = dataclasses.replace(policy, prefix_ids=np.resize(policy.prefix_ids, tokens))
    return dataclasses.replace(experiment, train_step=dataclasses.replace(experiment.train_step, policy=longer))


class _Programs:
    """The halves of an experiment's step as they are compiled for some devices, with what they are given."""

    def __init__(self, experiment: Experiment, devices: Sequence[Any], *, learns: bool) -> None:
        """Without learning there is no state of learning, and parameters are all that there is."""
        self._experiment = experiment
        # An experiment on one device has no mesh; here even that device has to be named.
        self.mesh = experiment.mesh or Mesh(np.array(devices), MESH_AXES[:1])
        state, fixed = experiment.abstract()
        if not learns:
            state, fixed = state.replace(opt_state=(), algorithm_state=()), fixed._replace(reference=None)
        self._state, self._fixed = (jax.tree.map(self._place, tree) for tree in (state, fixed))
        self._hp = jax.tree.map(self._place, experiment.abstract_hyperparameters())

    def _place(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Where an abstract array is, or whole on every device."""
        sharding = x.sharding or NamedSharding(self.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def lower(self, part: Part) -> jax.stages.Lowered:
        """A half, traced and lowered. A rollout is given the whole state too, for it stays in memory."""
        step, given = self._experiment.train_step, (self._state, self._fixed, self._hp)
        whole = NamedSharding(self.mesh, PartitionSpec())
        with on_mesh(self._experiment.mesh):
            if part == "rollout":
                return jax.jit(step.rollout, keep_unused=True, out_shardings=whole).lower(*given)
            episodes = jax.tree.map(self._place, jax.eval_shape(step.rollout, *given))
            after = jax.tree.map(lambda x: x.sharding, self._state), whole
            update = jax.jit(step.update, donate_argnums=0, out_shardings=after)
            return update.lower(self._state, episodes, self._fixed, self._hp)

    def resident(self) -> dict[str, float]:
        """Bytes on a chip that stay from iteration to iteration, by part."""
        state, fixed = self._state, self._fixed
        critic = state.algorithm_state
        parts = {
            "trained parameters": state.params,
            "frozen parameters": fixed.params,
            "reference": fixed.reference,
            "optimiser": (state.opt_state, critic.opt_state if critic else ()),
            "critic": (critic.params, critic.target) if critic else (),
        }
        return {name: size for name, tree in parts.items() if (size := _on_a_chip(tree))}


def _on_a_chip(tree: Any) -> float:
    """Bytes of abstract arrays on one device, by their shardings."""
    return float(sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)))


# Planning


def plan(
    config: TrainConfig, topology: Topology, *, parts: tuple[Part, ...] = ("rollout", "update"), assumed: Assumed
) -> Plan:
    """Compiles halves of a run's step for a slice, and says what they need and take.

    Args:
        config: of the run.
        topology: the slice.
        parts: what to compile; the rollout alone is an evaluation, without any state of learning.
        assumed: lengths, and the tokenizer.

    Raises:
        ConfigError: options that do not go together, an unknown model, or no compiler for TPUs.
    """
    if config.learn.micro_batch == "auto":
        raise ConfigError("--micro-batch auto: is found where the run trains; give plan a number, such as 32.")
    devices = topology.devices()
    model, tokenizer = find_model(config, devices, assumed)
    experiment = build(config, model=model)
    if assumed.prompt_tokens:
        experiment = _with_prompt(experiment, assumed.prompt_tokens)
    policy, limit = experiment.policy, experiment.game.game.environment.max_steps
    lengths = {
        "reply": min(assumed.reply_tokens or policy.reply_limit, policy.reply_limit),
        "steps": min(assumed.steps or limit, limit),
    }
    programs = _Programs(experiment, devices, learns="update" in parts)
    return Plan(
        topology=topology,
        mesh=dict(programs.mesh.shape),
        model=config.model,
        parameters=sum(math.prod(one.shape) for one in declare(model.config).values()),
        tokenizer=tokenizer,
        prompt_tokens=len(policy.prefix_ids),
        observation_tokens=experiment.game.max_tokens,
        reply_tokens=lengths["reply"],
        steps=lengths["steps"],
        episodes=config.episodes,
        rows=config.trained * lengths["steps"],
        resident=programs.resident(),
        parts={part: _compiled(programs, part, topology.chip, _bounds(experiment, **lengths)) for part in parts},
    )


def _bounds(experiment: Experiment, reply: int, steps: int) -> dict[str, int]:
    """Turns of the loops whose length is data, by the innermost scopes they are written in."""
    config, policy = experiment.config, experiment.policy
    assert config.learn.micro_batch != "auto"
    first, last = policy.sampled_span
    with on_mesh(experiment.mesh):
        rows = whole_rows(config.play.rollout_rows or config.episodes)
        micro_batch = whole_rows(int(config.learn.micro_batch))
    trained, played = config.trained * steps, config.episodes * (steps + 1)
    return {
        "steps": steps,
        "parts": math.ceil(config.episodes / rows),
        "reply": min(reply - 1, last - first - 1),
        "gradient/micro_batches": math.ceil(math.ceil(trained / config.learn.minibatches) / micro_batch),
        "targets/micro_batches": math.ceil(played / micro_batch),
        "micro_batches": math.ceil(trained / micro_batch),
    }


def bound_of(loop: hlo.Loop, bounds: Mapping[str, int]) -> int | None:
    """How often a loop runs by the scopes it is written in, the longest name that fits; None where none does."""
    scopes = loop.op_name.split("/")
    if scopes[-1] != "while" or len(scopes) < 2:
        return None
    for name, turns in sorted(bounds.items(), key=lambda item: -item[0].count("/")):
        *around, own = name.split("/")
        if scopes[-2] == own and all(scope in scopes for scope in around):
            return turns
    return None


def _compiled(programs: "_Programs", part: Part, chip: Chip, bounds: Mapping[str, int]) -> Compiled:
    begin = time.monotonic()
    compiled = try_compile(programs.lower(part))
    took = time.monotonic() - begin
    if isinstance(compiled, str):
        return Compiled(False, memory_in(compiled), {}, compile_seconds=took)
    memory = {name: float(size) for name, size in memory_parts(compiled).items()}
    needed = sum(memory.values())
    loops: dict[str, int] = {}

    def bound(loop: hlo.Loop) -> int | None:
        turns = bound_of(loop, bounds)
        loops[loop.op_name] = 1 if turns is None else turns
        return turns

    cost = hlo.cost(hlo.parse(compiled.as_text() or ""), bound)
    times = {
        "flops": cost.passes / chip.flops,
        "memory": cost.bytes / chip.bandwidth,
        "network": sum(traffic.bytes for traffic in cost.collectives) / (2 * chip.link),
    }
    return Compiled(
        fits=needed <= chip.memory,
        needed=needed,
        memory=memory,
        cost=cost,
        seconds=max(times["flops"], times["memory"]) + times["network"],
        bound=max(times, key=lambda name: times[name]),
        loops=loops,
        compile_seconds=took,
    )
