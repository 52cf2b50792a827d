"""From a configuration to the objects it names: the only place where names become models, games and algorithms."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from envs_jax.games import TokenizedGame, make_game, tokenize_game
from envs_jax.text.reader import CLOSE, OPEN
from jaxgrpo.action_policy import ActionPolicy, ActionTexts
from jaxgrpo.algorithms.algorithm import Advantages, Algorithm
from jaxgrpo.algorithms.etpo import ETPO
from jaxgrpo.algorithms.gigpo import GiGPO
from jaxgrpo.algorithms.ms_grpo import MSGRPO
from jaxgrpo.algorithms.ppo import PPO
from jaxgrpo.algorithms.step_grpo import StepGRPO
from jaxgrpo.beginning import CRITIC, RUN, Beginning, NamedModel, key_for
from jaxgrpo.config import ConfigError, HyperParameters, Switches, TrainConfig
from jaxgrpo.critic import CriticNetwork
from jaxgrpo.episodes import Episodes
from jaxgrpo.evaluation import Outcome, play_policy
from jaxgrpo.fitting import Fit, largest, memory_allowed, memory_needed
from jaxgrpo.model import weights
from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.placement import make_placed, placed
from jaxgrpo.model.sharding import everywhere, on_mesh, replicated
from jaxgrpo.model.trained import (
    add_nothing,
    join,
    switched_off,
)
from jaxgrpo.model.transformer import Transformer
from jaxgrpo.policy import LanguageAgentPolicy
from jaxgrpo.train_step import Fixed, Metrics, TrainState, TrainStep
from jaxgrpo.transcripts import transcript

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
    """What a configuration stands for, ready to run.

    Attributes:
        config: the configuration.
        game: the game with its text for the model's tokenizer.
        train_step: the step, not yet compiled; its `rollout` and `update` can be jitted apart.
        fit: how the micro-batch in `config` was chosen; None where it was given.
    """

    config: TrainConfig
    game: TokenizedGame
    train_step: TrainStep
    _beginning: Beginning
    fit: Fit | None = None

    @property
    def _model(self) -> NamedModel:
        return self._beginning.model

    @property
    def mesh(self) -> Mesh | None:
        """The devices that arrays are divided among; None is a single device."""
        return self._model.mesh

    @property
    def policy(self) -> LanguageAgentPolicy:
        """The language-agent policy."""
        return self.train_step.policy

    @functools.cached_property
    def hyperparameters(self) -> HyperParameters:
        """The configuration's traced numbers."""
        with jax.ensure_compile_time_eval():  # kept: asked for first inside of a trace, they must be none of its values
            return everywhere(self.mesh, HyperParameters.from_config(self.config))

    def abstract_hyperparameters(self) -> HyperParameters:
        """Shapes and types of the traced numbers."""
        return jax.eval_shape(lambda: HyperParameters.from_config(self.config))

    @property
    def origin(self) -> dict[str, Any] | None:
        """Run, iteration and digest of the parameters that `init` took from another run (`--init-from`), else None."""
        start = self._beginning.start
        return start and start.record()

    def frozen_digest(self) -> str | None:
        """A digest of the parameters that are not trained, for the manifest; None where all are."""
        return self._beginning.frozen_digest

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
        params = self.initial_params()
        return make_placed(self.mesh, lambda x: self._state(x).replace(params=None))(params).replace(params=params)

    def template(self) -> TrainState:
        """A state whose arrays are like those of `init`; no parameters are read for it."""
        abstract = self.abstract_state()
        return make_placed(self.mesh, lambda: jax.tree.map(_blank, abstract))()

    def abstract_state(self) -> TrainState:
        """Shapes, types and places of the state, without a value."""
        return placed(self.mesh, jax.eval_shape(self._state, self._model.abstract_trained()))

    def abstract(self) -> tuple[TrainState, Fixed]:
        """Shapes, types and places of the state and of what is fixed; no parameter is read or drawn for them."""
        reference = None
        if self.train_step.uses_reference:
            reference = self._model.abstract_trained()
            # Before training, adapters that add nothing are the base alone.
            reference = jax.eval_shape(switched_off, reference) if self._model.config.lora else reference
        return self.abstract_state(), Fixed(self._model.abstract_frozen(), placed(self.mesh, reference))

    def on(self, game: str) -> "Experiment":
        """The same model, beginning and options with another game."""
        return _build(dataclasses.replace(self.config, game=game), self._beginning)

    def _state(self, params: Any) -> TrainState:
        step, seed, hyperparameters = self.train_step, self.config.seed, HyperParameters.from_config(self.config)
        return TrainState(
            params=params,
            opt_state=step.init_optimizer(params, hyperparameters),
            algorithm_state=step.init_critic(key_for(seed, CRITIC), params, hyperparameters),
            key=key_for(seed, RUN),
            iteration=jnp.int32(0),
        )

    def step(self, state: TrainState, hyperparameters: HyperParameters) -> tuple[TrainState, Metrics]:
        """One iteration, one compiled function. The state given is donated: use the one returned.

        Args:
            state: where training stands.
            hyperparameters: traced numbers; changing them does not recompile.
        """
        return self._call(self._compiled, state, self.fixed, hyperparameters)

    def rollout(self, state: TrainState, hyperparameters: HyperParameters) -> Episodes:
        """The first half of `step`, compiled on its own: the iteration's episodes. The state is not donated."""
        return self._call(self._compiled_rollout, state, self.fixed, hyperparameters)

    def update(
        self, state: TrainState, episodes: Episodes, hyperparameters: HyperParameters
    ) -> tuple[TrainState, Metrics]:
        """The second half of `step`, compiled on its own: learns from the episodes of `rollout`. Donates the state."""
        return self._call(self._compiled_update, state, episodes, self.fixed, hyperparameters)

    def transcript(self, episodes: Episodes, iteration: int) -> Iterator[dict[str, Any]]:
        """Episodes of training as rows of text, see `transcripts.transcript`, made as they are read."""
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
        return self._call(
            play_policy,
            self.policy,
            self.game.scored,
            params if self._model.all_trained else join(params, self.fixed.params),
            episodes=episodes,
            temperature=temperature,
            seed=seed,
            rows=self.config.play.rollout_rows,
            keep_episodes=keep_episodes,
        )

    def _with_fitting_micro_batch(self) -> "Experiment":
        """The same experiment with the largest micro-batch, a power of two, whose `update` fits into memory.

        Raises:
            ConfigError: none does, or the memory is unknown.
        """
        allowed = memory_allowed()
        if allowed is None:
            raise ConfigError("--micro-batch auto: this device does not say how much memory it has; give a number.")
        rows = self.config.trained * self.game.game.environment.max_steps
        sizes = [2**n for n in range((rows - 1).bit_length() + 1)]
        least: list[int | None] = []

        def needed(size: int) -> int | None:
            least[:] = [self.with_micro_batch(size)._memory_of_update()]
            return least[0]

        fit = largest(sizes, allowed, needed)
        if fit is None:
            needs = f"needs {least[0] / 1e9:.2f} GB and" if least[0] else "does not fit:"
            raise ConfigError(
                f"--micro-batch auto: learning with a single row {needs} {allowed / 1e9:.2f} GB may be taken; give a "
                "smaller model, --lora.rank, a shorter --reply-limit, or more devices."
            )
        return dataclasses.replace(self.with_micro_batch(fit.size), fit=fit)

    def with_micro_batch(self, size: int) -> "Experiment":
        """The same experiment with so many rows in a micro-batch."""
        learn = dataclasses.replace(self.config.learn, micro_batch=size)
        config = dataclasses.replace(self.config, learn=learn)
        step = dataclasses.replace(self.train_step, config=config)
        return dataclasses.replace(self, config=config, train_step=step)

    def _memory_of_update(self) -> int | None:
        """Bytes that the compiled `update` takes of each device; None where it cannot fit."""
        (state, fixed), hyperparameters = self.abstract(), self.abstract_hyperparameters()

        def lower() -> jax.stages.Lowered:
            episodes = jax.eval_shape(self.train_step.rollout, state, fixed, hyperparameters)
            return self._compiled_update.lower(state, placed(self.mesh, episodes), fixed, hyperparameters)

        return memory_needed(self._call(lower))

    def _call(self, function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
        """Calls what is traced for the mesh; the arguments are made outside of it, for their own devices."""
        with on_mesh(self.mesh):
            return function(*args, **kwargs)

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

        return jax.jit(train_step, donate_argnums=0, out_shardings=self._after)

    @functools.cached_property
    def _compiled_rollout(self) -> Any:
        return jax.jit(self.train_step.rollout, out_shardings=replicated(self.mesh))

    @functools.cached_property
    def _compiled_update(self) -> Any:
        return jax.jit(self.train_step.update, donate_argnums=0, out_shardings=self._after)

    @property
    def _after(self) -> Any:
        """Where a state and metrics lie after an iteration: the state as before it, metrics everywhere."""
        if self.mesh is None:
            return None
        return jax.tree.map(lambda x: x.sharding, self.abstract_state()), replicated(self.mesh)

    @functools.cached_property
    def _advantages(self) -> Any:
        return jax.jit(self.train_step.algorithm.advantages)  # pyright: ignore[reportAttributeAccessIssue]


def _blank(abstract: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(abstract.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), abstract.shape)
    return jnp.zeros(abstract.shape, abstract.dtype)


def build(config: TrainConfig, devices: Sequence[Any] | None = None, model: NamedModel | None = None) -> Experiment:
    """The experiment a configuration describes.

    Args:
        config: the configuration.
        devices: that arrays are divided among as `--mesh` says; None is all that there are.
        model: its model, where it is found already: for planning, for devices that are not here and without weights.

    Raises:
        ConfigError: options that do not go together.
        GameError: no such game.
        RenderError: the game's text cannot be rendered exactly with the model's tokenizer.
        WeightsError: the model is absent, damaged or unknown.
        UnsupportedModelError: the model has a feature that is not computed here.
    """
    experiment = _build(config, Beginning(config, devices, model))
    return experiment._with_fitting_micro_batch() if config.learn.micro_batch == "auto" else experiment


def _build(config: TrainConfig, beginning: Beginning) -> Experiment:
    model, options = beginning.model, config.play
    text_game = make_game(config.game, style=options.style, reply=options.reply, shots=options.shots)
    game = tokenize_game(text_game, model.tokenizer, reply_limit=options.reply_limit, constrain=options.constrain)
    chooses = config.algorithm == "twosome"
    shortest = _shortest_reply(game)
    if shortest > options.reply_limit:
        raise ConfigError(
            f"--reply-limit {options.reply_limit}: the shortest readable reply of {config.game} has {shortest} tokens; "
            f"give at least {shortest}{', or --no-constrain' if options.constrain and not chooses else ''}."
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
        # A TPU's decoding is bound by reading the weights, for few rows as for many.
        fewest_rows=config.episodes if model.config.scan_decode else LanguageAgentPolicy.fewest_rows,
    )
    if chooses:
        texts = ActionTexts.make(text_game.actions, model.tokenizer)
        policy = ActionPolicy.over(texts, options.action_length, policy)
    algorithm = _algorithm(config)
    step = TrainStep(policy, game, algorithm, config, _critic(config, algorithm, model.config))
    return Experiment(config, game, step, beginning)


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
    "twosome": PPO,
}


def _critic(config: TrainConfig, algorithm: Algorithm, model: ModelConfig) -> CriticNetwork | None:
    if algorithm.critic == "none":
        return None
    learn = config.learn
    return CriticNetwork(learn.critic, algorithm.critic, learn.critic_width, model.width, model.vocab_size)
