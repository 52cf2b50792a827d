"""From a configuration to the objects it names: the only place where names become models, games and algorithms."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from envs_jax.games import TokenizedGame, make_game, tokenize_game
from envs_jax.text.reader import CLOSE, OPEN
from envs_jax.text.tokenizer import TextTokenizer
from jaxgrpo.algorithms.algorithm import Advantages, Algorithm
from jaxgrpo.algorithms.etpo import ETPO
from jaxgrpo.algorithms.gigpo import GiGPO
from jaxgrpo.algorithms.ms_grpo import MSGRPO
from jaxgrpo.algorithms.ppo import PPO
from jaxgrpo.algorithms.step_grpo import StepGRPO
from jaxgrpo.checkpoints import Checkpoints
from jaxgrpo.config import ConfigError, HyperParameters, LoRAConfig, Switches, TrainConfig, with_options
from jaxgrpo.critic import CriticNetwork
from jaxgrpo.episodes import Episodes
from jaxgrpo.evaluation import Outcome, play_policy
from jaxgrpo.export import transcript
from jaxgrpo.model import weights
from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.lora import LoRA, parse_targets
from jaxgrpo.model.trained import (
    add_nothing,
    base_types,
    cast_base,
    initial_adapters,
    join,
    merge_adapters,
    parse_layers,
    restack,
    split_trained,
    switched_off,
)
from jaxgrpo.model.transformer import Stack, Transformer
from jaxgrpo.policy import LanguageAgentPolicy
from jaxgrpo.records import RunFolder, digest, read_manifest
from jaxgrpo.storage import AnyPath
from jaxgrpo.train_step import Fixed, Metrics, TrainState, TrainStep

_WEIGHTS, _RUN, _CRITIC = 0, 1, 3
"""Folded into the seed's key; held-out episodes have a number of their own in `evaluation`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
    """What a configuration stands for, ready to run.

    Attributes:
        config: the configuration.
        game: the game with its text for the model's tokenizer.
        train_step: the step, not yet compiled; its `rollout` and `update` can be jitted apart.
    """

    config: TrainConfig
    game: TokenizedGame
    train_step: TrainStep
    _beginning: "_Beginning"

    @property
    def _model(self) -> "_Model":
        return self._beginning.model

    @property
    def policy(self) -> LanguageAgentPolicy:
        """The language-agent policy."""
        return self.train_step.policy

    @functools.cached_property
    def hyperparameters(self) -> HyperParameters:
        """The configuration's traced numbers."""
        with jax.ensure_compile_time_eval():  # kept: asked for first inside of a trace, they must be none of its values
            return HyperParameters.from_config(self.config)

    @property
    def origin(self) -> dict[str, Any] | None:
        """Run, iteration and digest of the parameters that `init` took from another run (`--init-from`), else None."""
        start = self._beginning.start
        return start and start.record()

    @functools.cached_property
    def fixed(self) -> Fixed:
        """What the run never changes: what is frozen, and the starting model where the algorithm compares with it."""
        with jax.ensure_compile_time_eval():  # as in `hyperparameters`
            frozen = self._beginning.frozen()
            if not self.train_step.uses_reference:
                return Fixed(frozen, None)
            trained = self._beginning.trained()
            # Before training, adapters that add nothing are the base alone.
            return Fixed(frozen, switched_off(trained) if self._model.config.lora and add_nothing(trained) else trained)

    def initial_params(self) -> Any:
        """The trained parameters before the first iteration: another run's, the model's own, or drawn from the seed."""
        return self._beginning.trained()

    def init(self) -> TrainState:
        """The state before the first iteration."""
        return self._state(self.initial_params())

    def template(self) -> TrainState:
        """A state whose arrays are like those of `init`; no parameters are read for it."""
        return self._state(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._model.abstract_trained()))

    def on(self, game: str) -> "Experiment":
        """The same model, beginning and options with another game."""
        return _build(dataclasses.replace(self.config, game=game), self._beginning)

    def _state(self, params: Any) -> TrainState:
        return TrainState(
            params=params,
            opt_state=jax.jit(self.train_step.init_optimizer)(params, self.hyperparameters),
            algorithm_state=self.train_step.init_critic(_key(self.config.seed, _CRITIC), params, self.hyperparameters),
            key=_key(self.config.seed, _RUN),
            iteration=jnp.int32(0),
        )

    def step(self, state: TrainState, hyperparameters: HyperParameters) -> tuple[TrainState, Metrics]:
        """One iteration, one compiled function. The state given is donated: use the one returned.

        Args:
            state: where training stands.
            hyperparameters: traced numbers; changing them does not recompile.
        """
        return self._compiled(state, self.fixed, hyperparameters)

    def rollout(self, state: TrainState, hyperparameters: HyperParameters) -> Episodes:
        """The first half of `step`, compiled on its own: the iteration's episodes. The state is not donated."""
        return self._compiled_rollout(state, self.fixed, hyperparameters)

    def update(
        self, state: TrainState, episodes: Episodes, hyperparameters: HyperParameters
    ) -> tuple[TrainState, Metrics]:
        """The second half of `step`, compiled on its own: learns from the episodes of `rollout`. Donates the state."""
        return self._compiled_update(state, episodes, self.fixed, hyperparameters)

    def transcript(self, episodes: Episodes, iteration: int) -> Iterator[dict[str, Any]]:
        """Episodes of training as rows of text, see `export.transcript`, made as they are read."""
        algorithm = self.train_step.algorithm
        advantages = self._advantages(episodes, self.hyperparameters) if isinstance(algorithm, Advantages) else None
        return transcript(self.game, episodes, iteration=iteration, advantages=advantages)

    def evaluate(
        self, params: Any, *, episodes: int, temperature: float, seed: int = 0, keep_episodes: bool = False
    ) -> Outcome:
        """Plays held-out episodes of the game as it is scored, see `play_policy`.

        Args:
            params: the trained parameters, `TrainState.params`.
            episodes: how many.
            temperature: of sampling; 0 is greedy.
            seed: which held-out episodes.
            keep_episodes: whether to return the episodes themselves as well.
        """
        return play_policy(
            self.policy,
            self.game.scored,
            params if self._model.all_trained else join(params, self.fixed.params),
            episodes=episodes,
            temperature=temperature,
            seed=seed,
            rows=self.config.play.rollout_rows,
            keep_episodes=keep_episodes,
        )

    def save_pretrained(self, folder: Path, params: Any, *, dtype: str = "float32") -> None:
        """Writes the whole model and its tokenizer as Hugging Face files, which transformers and `--model` load.

        Args:
            folder: for the files.
            params: the trained parameters, `TrainState.params`; adapters are merged into the matrices as these are
                written.
            dtype: of the stored weights, float32 or bfloat16.
        """
        self._save_model(folder, self._model.config, join(params, self.fixed.params), dtype)

    def save_adapters(self, folder: Path, params: Any, *, place: Path, dtype: str = "float32") -> bool:
        """Writes the adapters of a run as PEFT's files and, unless PEFT can load it from `--model`, their base.

        The base is written into the folder's `base/` where it is drawn from the seed, expanded from a GGUF file, or
        begins where another run stood (`--init-from`).

        Args:
            folder: for the files.
            params: the trained parameters, `TrainState.params`.
            place: where the folder will stand when others load it.
            dtype: of the base's stored weights, float32 or bfloat16.

        Returns:
            Whether the base was written.

        Raises:
            ConfigError: the run has no adapters.
        """
        model = self._model
        if model.config.lora is None:
            raise ConfigError("--format peft: the run trained the model itself, without adapters; give --format hf.")
        published = model.path.is_dir() and self._beginning.start is None
        base = str(place.absolute() / "base")
        if published:
            given = Path(self.config.model)
            base = str(given.absolute()) if given.is_dir() else self.config.model
        else:
            self._save_model(folder / "base", dataclasses.replace(model.config, lora=None), self.fixed.params, dtype)
        weights.save_adapters(folder, model.config, params, base=base, stacks=model.stacks)
        return not published

    def _save_model(self, folder: Path, config: ModelConfig, whole: Any, dtype: str) -> None:
        weights.save_pretrained(folder, config, whole, dtype=dtype, stacks=self._model.stacks)
        # The configuration of the model may name ends that the tokenizer's files do not.
        dataclasses.replace(self.game.tokenizer, eos_ids=self.policy.eos_ids).save_pretrained(folder)

    @functools.cached_property
    def _compiled(self) -> Any:
        def train_step(*args: Any) -> Any:  # for its name, which profiles and warnings show
            return self.train_step(*args)

        return jax.jit(train_step, donate_argnums=0)

    @functools.cached_property
    def _compiled_rollout(self) -> Any:
        return jax.jit(self.train_step.rollout)

    @functools.cached_property
    def _compiled_update(self) -> Any:
        return jax.jit(self.train_step.update, donate_argnums=0)

    @functools.cached_property
    def _advantages(self) -> Any:
        return jax.jit(self.train_step.algorithm.advantages)  # pyright: ignore[reportAttributeAccessIssue]


def build(config: TrainConfig) -> Experiment:
    """The experiment a configuration describes.

    Raises:
        ConfigError: options that do not go together.
        GameError: no such game.
        RenderError: the game's text cannot be rendered exactly with the model's tokenizer.
        WeightsError: the model is absent, damaged or unknown.
        UnsupportedModelError: the model has a feature that is not computed here.
    """
    return _build(config, _Beginning(config))


def _build(config: TrainConfig, beginning: "_Beginning") -> Experiment:
    model, options = beginning.model, config.play
    text_game = make_game(config.game, style=options.style, reply=options.reply, shots=options.shots)
    game = tokenize_game(text_game, model.tokenizer, reply_limit=options.reply_limit, constrain=options.constrain)
    shortest = _shortest_reply(game)
    if shortest > options.reply_limit:
        raise ConfigError(
            f"--reply-limit {options.reply_limit}: the shortest readable reply of {config.game} has {shortest} tokens; "
            f"give at least {shortest}{', or --no-constrain' if options.constrain else ''}."
        )
    policy = LanguageAgentPolicy(
        graphdef=nnx.split(Transformer.abstract(model.config, model.stacks))[0],
        prefix_ids=game.prefix_ids,
        reader=game.reader,
        constraint=game.constraint,
        eos_ids=tuple(sorted({*game.eos_ids, *model.config.eos_ids})),
        vocab_size=min(game.tokenizer.vocab_size, model.config.vocab_size),
        reply_limit=options.reply_limit,
        top_k=options.top_k,
        truncate_top_p=Switches.from_config(config).top_p,
        remat=model.config.layers > _LAYERS_KEPT,
    )
    algorithm = _algorithm(config)
    step = TrainStep(policy, game, algorithm, config, _critic(config, algorithm, model.config))
    return Experiment(config, game, step, beginning)


def _key(seed: int, purpose: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), purpose)


_LAYERS_KEPT = 4
"""Models of so few layers keep their activations for the backward pass; deeper ones recompute them."""


def _shortest_reply(game: TokenizedGame) -> int:
    """Tokens that a reply must have room for: what the constraint needs, or free thoughts without any text.

    A free action may be cut by the limit, which is one way of learning to keep it.
    """
    if game.constraint is not None:
        return int(game.constraint.distance[game.constraint.start])
    if game.game.reply == "action":
        return 1
    form = f"<think></think><plan></plan>{OPEN}{{}}{CLOSE}"
    return min(len(game.tokenizer.encode(form.format(word))) for word in game.game.actions)


def restore_params(folder: AnyPath | str) -> tuple[TrainConfig, Any]:
    """A run's configuration, as for going on with it, and its trained parameters as of the last checkpoint.

    Raises:
        ConfigError: the folder holds no run, or a run without a checkpoint.
    """
    run, config, iteration = _last_checkpoint(str(folder), option="--run")
    return config, _trained_at(run, iteration, _Model.find(config))


def _last_checkpoint(text: str, *, option: str) -> tuple[RunFolder, TrainConfig, int]:
    """The run in a folder that an option names, its configuration as resumed, and its last checkpoint's iteration."""
    run = RunFolder.at(text, option=option)
    if not run.config.exists():
        raise ConfigError(f"{option} {text}: holds no run; give a folder that `jaxgrpo train` made.")
    config = with_options(run.read_config(), {"out": text, "resume": True})
    with contextlib.closing(Checkpoints(run.checkpoints, keep=None)) as checkpoints:
        latest = checkpoints.latest
    if latest is None:
        raise ConfigError(f"{option} {text}: holds no checkpoint yet; let the run reach its first one.")
    return run, config, latest


def _trained_at(run: RunFolder, iteration: int, model: "_Model") -> Any:
    """The trained parameters, and nothing else, of a checkpoint made with the model."""
    with contextlib.closing(Checkpoints(run.checkpoints, keep=None)) as checkpoints:
        return checkpoints.restore_params(iteration, model.abstract_trained())


def _whole_at(run: RunFolder, config: TrainConfig, iteration: int) -> Any:
    """All parameters of a run at a checkpoint, layers in one stack: what it trained, and the rest as it began."""
    beginning = _Beginning(config)
    trained = _trained_at(run, iteration, beginning.model)
    return trained if beginning.model.all_trained else beginning.model.unite(trained, beginning.frozen())


class _Beginning:
    """The parameters before a run's first iteration.

    The frozen ones are read once and kept, as nothing changes them; the trained ones are read anew every time, for who
    asks for them may give them away.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.model = _Model.find(config)
        self.start = _Start.find(config)
        self._config = config
        self._frozen: Any = nnx.State({}) if self.model.all_trained else None

    def trained(self) -> Any:
        if self.start is None and self.model.config.lora is not None:
            return self.model.adapters(self._config.seed)  # not read from anywhere
        return self._read()

    def frozen(self) -> Any:
        if self._frozen is None:
            self._read()
        return self._frozen

    def _read(self) -> Any:
        model, seed = self.model, self._config.seed
        trained, frozen = model.own(seed) if self.start is None else self.start.parts(self._config, model)
        if self._frozen is None:
            self._frozen = frozen
        return trained


@dataclasses.dataclass
class _Start:
    """The checkpoint of another run from which a run takes its starting parameters."""

    run: str
    iteration: int
    digest: str | None = None
    """Of the parameters, once they were read here or in an earlier session."""

    @classmethod
    def find(cls, config: TrainConfig) -> "_Start | None":
        """The last checkpoint of `init_from`; of a resumed run the one it was begun with, not looked for until needed.

        Raises:
            ConfigError: no run is there, no checkpoint, or it is another model's.
        """
        if config.init_from is None:
            return None
        if config.run.resume and (begun := RunFolder.of(config).manifest).exists():
            origin = read_manifest(begun)["init_from"]
            return cls(origin["run"], origin["iteration"], origin["digest"])
        _, stored, iteration = _last_checkpoint(config.init_from, option="--init-from")
        if Path(stored.model).name != Path(config.model).name:
            raise ConfigError(
                f"--init-from {config.init_from}: is a run of --model {stored.model}, and this one is of "
                f"--model {config.model}; give the same model."
            )
        if config.lora.rank and stored.lora.rank and _adapters_of(config) != _adapters_of(stored):
            raise ConfigError(
                f"--init-from {config.init_from}: has adapters of {_adapters_of(stored)}, and this run "
                f"{_adapters_of(config)}; give the same, or --lora.rank 0 to go on from the merged model."
            )
        return cls(config.init_from, iteration)

    def parts(self, config: TrainConfig, model: "_Model") -> tuple[Any, Any]:
        """Trained and frozen parameters of the run that starts here, the same at every call and in every session.

        From one run with adapters to another these go on, on the base they were trained on. Else all parameters of the
        checkpoint, its adapters merged, are divided as this run does.

        Args:
            config: of the run that starts here.
            model: of that run.

        Raises:
            ConfigError: the checkpoint is gone, is another one now, or is another model's.
        """
        run, stored, latest = _last_checkpoint(self.run, option="--init-from")
        if not (run.checkpoints / str(self.iteration)).exists():
            raise ConfigError(
                f"--init-from {self.run}: this run began with its checkpoint {self.iteration}, which is gone (the last "
                f"one is {latest}); put it back, or start in another folder."
            )
        stored = with_options(stored, {"model": config.model, "base_dtype": config.learn.base_dtype})
        if not (model.config.lora and stored.lora.rank):
            whole = _whole_at(run, stored, self.iteration)
            self._recognise(whole)
            return model.divide(whole, config.seed)
        adapters = _trained_at(run, self.iteration, model)
        self._recognise(adapters)
        return adapters, _Beginning(stored).frozen()

    def _recognise(self, params: Any) -> None:
        """See that the parameters are those this run began with, once it has."""
        found = f"{int(digest(params)):08x}"
        if self.digest not in (None, found):
            raise ConfigError(
                f"--init-from {self.run}: its checkpoint {self.iteration} has other parameters than this run began "
                f"with (digest {found}, not {self.digest}); put it back, or start in another folder."
            )
        self.digest = found

    def record(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return dataclasses.asdict(self)


def _adapters_of(config: TrainConfig) -> str:
    """The options that adapters must share to stand for one another, as a user writes them."""
    lora = _lora(config.lora)
    assert lora is not None
    targets = "all-linear" if lora.targets == LoRA.targets else ",".join(lora.targets)
    return (
        f"--lora.rank {lora.rank} --lora.alpha {lora.alpha:g} --lora.targets {targets} "
        f"--train-layers {config.learn.train_layers}"
    )


def _lora(options: LoRAConfig) -> LoRA | None:
    """The adapters that options ask for, if any."""
    try:
        targets = parse_targets(options.targets)
    except ValueError as error:
        raise ConfigError(f"--lora.targets {options.targets}: {error}.") from None
    return LoRA(options.rank, options.alpha, targets) if options.rank else None


def _algorithm(config: TrainConfig) -> Algorithm:
    return _ALGORITHMS[config.algorithm].from_config(config)


_ALGORITHMS = {
    "ms-grpo": MSGRPO,
    "gigpo": GiGPO,
    "step-grpo": StepGRPO,
    "etpo": ETPO,
    "ppo-kl": PPO,
    "poad": PPO,
    "ntpo": PPO,
}


def _critic(config: TrainConfig, algorithm: Algorithm, model: ModelConfig) -> CriticNetwork | None:
    if algorithm.critic == "none":
        return None
    learn = config.learn
    return CriticNetwork(learn.critic, algorithm.critic, learn.critic_width, model.width, model.vocab_size)


@dataclasses.dataclass(frozen=True, eq=False)
class _Model:
    """A model as a name finds it: its configuration and tokenizer, its weights not read yet."""

    path: Path
    config: ModelConfig
    tokenizer: TextTokenizer
    stacks: tuple[Stack, ...]
    base_dtype: str
    """Of the base under adapters."""

    @classmethod
    def find(cls, options: TrainConfig) -> "_Model":
        name, train_layers = options.model, options.learn.train_layers
        path = weights.resolve_model(name)
        config = weights.read_config(path, compute_dtype=_default_dtype())
        if name == "tiny":
            tokenizer = TextTokenizer.tiny()
        elif path.suffix == ".gguf":
            tokenizer = TextTokenizer.from_gguf(path)
        else:
            tokenizer = TextTokenizer.from_pretrained(path)
        if tokenizer.vocab_size > config.vocab_size:
            raise ConfigError(
                f"--model {name}: the tokenizer has {tokenizer.vocab_size} ids and the model only "
                f"{config.vocab_size}; they do not belong together."
            )
        try:
            stacks = parse_layers(train_layers, config.layers)
        except ValueError as error:
            raise ConfigError(f"--train-layers {train_layers}: {error}.") from None
        base_dtype = _default_dtype() if options.learn.base_dtype == "auto" else options.learn.base_dtype
        return cls(path, dataclasses.replace(config, lora=_lora(options.lora)), tokenizer, stacks, base_dtype)

    @property
    def all_trained(self) -> bool:
        return self.config.lora is None and all(stack.trained for stack in self.stacks)

    @property
    def _bare(self) -> ModelConfig:
        """The configuration without adapters."""
        return dataclasses.replace(self.config, lora=None)

    @property
    def _types(self) -> Any:
        """Of the model's own parameters: all float32 where they are trained, else those of a base."""
        return jnp.float32 if self.config.lora is None else base_types(self.config, self.base_dtype)

    def abstract_trained(self) -> Any:
        """Shapes and types of the parameters that are trained."""
        return split_trained(nnx.split(Transformer.abstract(self.config, self.stacks))[1], self.stacks)[0]

    def adapters(self, seed: int) -> Any:
        """Adapters before any training."""
        return initial_adapters(self.config, self.stacks, _key(seed, _WEIGHTS))

    def divide(self, whole: Any, seed: int) -> tuple[Any, Any]:
        """Trained and frozen parameters out of all, whose layers are in one stack; adapters are drawn from the seed."""
        if len(self.stacks) > 1:
            whole = restack(nnx.merge(nnx.split(Transformer.abstract(self._bare))[0], whole), self.stacks)
        if self.config.lora is not None:
            return self.adapters(seed), cast_base(whole, self._types)
        return split_trained(whole, self.stacks)

    def unite(self, trained: Any, frozen: Any) -> Any:
        """All parameters out of the two parts, their layers in one stack; adapters are merged."""
        model = nnx.merge(nnx.split(Transformer.abstract(self.config, self.stacks))[0], join(trained, frozen))
        return restack(model, (Stack(self.config.layers),)) if self.config.lora is None else merge_adapters(model)

    def own(self, seed: int) -> tuple[Any, Any]:
        """Trained and frozen parameters of the model's files or, where it has none, drawn from the seed.

        Those in files are read as they are divided, without a copy.
        """
        if self.path.suffix == ".json":
            return self.divide(jax.jit(functools.partial(weights.init, self._bare))(_key(seed, _WEIGHTS)), seed)
        dtype = self.config.compute_dtype
        loaded = weights.load(self.path, compute_dtype=dtype, dtype=self._types, stacks=self.stacks)[1]
        if self.config.lora is not None:
            return self.adapters(seed), loaded
        return split_trained(loaded, self.stacks)


def _default_dtype() -> str:
    """Full precision on the CPU, where it is as fast; bfloat16 on accelerators."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"
