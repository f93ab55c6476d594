"""PPOExt: its options, the order of operations, and what is saved."""

import inspect
import time
import warnings
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    BasePolicy,
    MultiInputActorCriticPolicy,
)
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, RolloutBufferSamples, Schedule, TensorDict
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.patch_gym import _patch_env

from sb3_ppo_ext.common.observations import in_float32
from sb3_ppo_ext.common.saved_models import SavedModel, check_saved_ppo, read_policy_kwargs, read_renamed
from sb3_ppo_ext.common.schedules import DecaySchedule, KLAdaptive, ScheduleLike, is_constant, make_schedule, value_of
from sb3_ppo_ext.common.validation import (
    SUPPORTED_SPACES,
    assertions_as_value_errors,
    check_action_space,
    check_device,
    check_known_options,
    check_observation_space,
    refuse,
)
from sb3_ppo_ext.distributions import ACTION_DISTS
from sb3_ppo_ext.engines.engine import Engine, Setup
from sb3_ppo_ext.engines.registry import ENGINES, choose_backend
from sb3_ppo_ext.memory.policies import (
    CnnTransformerPolicy,
    MlpTransformerPolicy,
    MultiInputTransformerPolicy,
    TransformerPolicyMixin,
)
from sb3_ppo_ext.memory.sequences import SequenceDictRolloutBuffer, SequenceRolloutBuffer
from sb3_ppo_ext.options import ALL_OPTIONS, OWN_OPTIONS, PPOExtOptions, check_options
from sb3_ppo_ext.options.table import (
    ActionDist,
    AdvantageNorm,
    Backend,
    BadGradients,
    DeterministicAction,
    LrDecay,
    OptimizerName,
    SurrogateName,
    VfClipMode,
)
from sb3_ppo_ext.policies.actor_critic import MlpPolicy, check_parameters_are_of, fixes_std, with_action_distributions
from sb3_ppo_ext.rollout.actors import Actor, RolloutConfig
from sb3_ppo_ext.rollout.collector import RolloutCollector
from sb3_ppo_ext.rollout.fast_dummy_vec_env import FastDummyVecEnv
from sb3_ppo_ext.update.advantages import AdvantageNormalizer
from sb3_ppo_ext.update.config import UpdateConfig
from sb3_ppo_ext.update.losses import AUXILIARY_LOSSES, LossConfig
from sb3_ppo_ext.update.metrics import Metrics
from sb3_ppo_ext.update.optimizers import adopt_state, critic_parameters, make_optimizer
from sb3_ppo_ext.update.ppo_loss import ExtraActorLoss
from sb3_ppo_ext.update.report import further_metrics, sb3_metrics
from sb3_ppo_ext.update.rollout import Rollout
from sb3_ppo_ext.update.update import UpdateResult

SelfPPOExt = TypeVar("SelfPPOExt", bound="PPOExt")
# What an option learns beside the policy: saved under these names when it is there
LEARNED = ("advantage_normalizer", "kl_coefficient", "adaptive_lr")


# Options that an update is given as they are
OF_UPDATE = tuple(
    field.name for field in fields(UpdateConfig) if field.name in ALL_OPTIONS.keys() | {"verbose", "num_timesteps"}
)


class PPOExt(PPOExtOptions, RolloutCollector):
    """
    Proximal Policy Optimization (PPO), as in Stable-Baselines3: with the same seed on a CPU it gives the same
    numbers as ``stable_baselines3.PPO``, to the bit.

    Paper: https://arxiv.org/abs/1707.06347

    Every argument is checked before anything is built. One that is not valid raises a ``ValueError`` with its name,
    its value and the remedy (it is an ``AssertionError`` as well where SB3 raises that).

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, MultiInputPolicy, or a class)
    :param env: The environment to learn from (if registered in Gymnasium, can be str)
    :param learning_rate: Learning rate of the optimiser, at least 0: a number, a function of the remaining progress (from
        1 to 0), or ``"lin_3e-4"`` for a linear decay to 0
    :param n_steps: Number of steps to run for each environment per update, at least 1 (the rollout holds ``n_steps *
        n_envs`` samples, which must be more than 1 with ``normalize_advantage``)
    :param batch_size: Minibatch size, at least 1, and at least 2 with ``normalize_advantage``
    :param n_epochs: Number of passes over the rollout in each update, at least 1
    :param gamma: Discount factor, in [0, 1]
    :param gae_lambda: Factor for the trade-off of bias and variance in Generalized Advantage Estimation (GAE), in [0, 1]
    :param clip_range: Clipping parameter of the probability ratio, at least 0: a number, a function of the remaining
        progress, or ``"lin_0.2"``
    :param clip_range_vf: Clipping parameter of the value function, in units of the return; ``None`` for no clipping.
        Greater than 0, given in the same ways as ``clip_range``
    :param normalize_advantage: Whether to normalize the advantages (see ``advantage_norm``)
    :param ent_coef: Coefficient of the entropy in the loss, at least 0, given in the same ways as ``learning_rate``
    :param vf_coef: Coefficient of the value loss, at least 0
    :param max_grad_norm: Maximum norm of the gradient, which is scaled down if it is larger. At least 0 (``float("inf")``
        for no limit)
    :param use_sde: Whether to use generalized State-Dependent Exploration (gSDE) instead of independent noise at each step
    :param sde_sample_freq: Sample a new noise matrix every n steps when using gSDE
        Default: -1 (only sample at the beginning of the rollout)
    :param rollout_buffer_class: Rollout buffer class to use. If ``None``, it will be automatically selected.
    :param rollout_buffer_kwargs: Keyword arguments to pass to the rollout buffer on creation
    :param target_kl: Stop the update early when the estimated KL divergence exceeds 1.5 times this value; ``None`` for no
        limit. At least 0
    :param stats_window_size: Number of episodes over which the logged success rate, mean episode length and mean reward
        are averaged. At least 0
    :param tensorboard_log: the log location for tensorboard (if None, no logging)
    :param policy_kwargs: Additional keyword arguments to be passed to the policy on creation
    :param verbose: Verbosity level: 0 for no output, 1 for info messages (such as device or wrappers used), 2 for
        debug messages
    :param seed: Seed of the pseudo-random number generators, from 0 to 2**32 - 1
    :param device: Device (cpu, cuda, ...) on which the code should be run.
        Setting it to auto, the code will be run on the GPU if possible.
    :param _init_setup_model: Whether or not to build the network at the creation of the instance

    The options that PPOExt adds are given by keyword, and by default they change nothing. ``docs/options.md`` has the
    formulas and says when to use which, ``docs/options_reference.md`` is a table of all options.

    :param action_dist: Distribution of the actions in a ``Box`` action space: ``"gaussian"`` is SB3's, whose samples are
        clipped to the bounds; ``"squashed_gaussian"`` (the tanh of a Gaussian) and ``"beta"`` stay within the bounds
    :param deterministic_action: Action of a Beta distribution that ``predict(..., deterministic=True)`` returns: its
        ``"mean"`` or its ``"mode"``
    :param advantage_norm: Statistics that ``normalize_advantage`` normalizes by: those of each ``"minibatch"``, those of
        the ``"rollout"``, or exponential moving averages over the rollouts (``"ema"``)
    :param adv_ema_alpha: Weight of the newest rollout in the moving averages, with ``advantage_norm="ema"``; in (0, 1]
    :param adv_ema_warm_start: Whether the moving averages are corrected for their bias at the start and include a rollout
        before it is normalized; ``False`` is ProtoMotions' scheme
    :param adv_min_std: Smallest standard deviation that advantages are divided by, in units of the return, with
        ``advantage_norm="ema"``; greater than 0
    :param adv_clip: Largest absolute value of a normalized advantage, to which larger ones are clipped, with
        ``advantage_norm="ema"``; greater than 0
    :param adv_shift_mean: Whether the mean is subtracted from the advantages, with ``advantage_norm="ema"``
    :param bounds_coef: Coefficient of the bounds loss, which penalizes mean actions outside the bounds of a ``Box`` action
        space. At least 0
    :param bounds_limit: Absolute value of the mean action above which the bounds loss acts, where 1 is the bound of the
        action space. At least 0. With ``action_dist="squashed_gaussian"`` it limits the mean before the tanh, where 1.1 is
        80 % of the bound
    :param vf_clip_mode: Value loss with ``clip_range_vf``: ``"clip"`` is the error of the clipped value (SB3), ``"max"``
        the larger of the clipped and the unclipped error (PPO2)
    :param surrogate: Policy loss: ``"clip"`` is PPO's clipped surrogate, ``"spo"`` that of Simple Policy Optimization
        (https://arxiv.org/abs/2401.16025)
    :param dual_clip: Bound of the policy loss for negative advantages, as a multiple of the advantage
        (https://arxiv.org/abs/1912.09729); ``None`` for no bound. Greater than 1, for ``surrogate="clip"``
    :param kl_coef: Coefficient of the KL penalty, KL(old policy || new policy), at least 0
    :param kl_target: KL divergence in nats that ``kl_coef`` is adapted to after each update; ``None`` for a fixed
        coefficient. Greater than 0
    :param vtrace: Whether to estimate the advantages anew before each epoch, corrected by V-trace for the change of the
        policy since the rollout (https://arxiv.org/abs/1802.01561)
    :param vtrace_rho: Upper bound of the importance ratio of a step, which weights its TD error. Greater than 0
    :param vtrace_c: Upper bound of the importance ratio that weights the TD errors of the steps that follow. At least 0
    :param priority_alpha: Exponent of the priority with which segments are drawn, their sum of absolute advantages: 0 for
        each sample once per epoch, 1 for draws in proportion to it (https://arxiv.org/abs/1511.05952). At least 0
    :param priority_beta: Exponent of the importance weights that correct for the priorities, at the start of the training;
        it grows to 1 at the end. In [0, 1]
    :param priority_segment: Number of successive steps that are drawn together, at most ``n_steps`` and ``batch_size``. At
        least 1
    :param optimizer: Optimiser of the policy: ``"adam"``, ``"adamw"``, ``"sgd"``, or ``"muon"`` for hidden weight matrices
        with AdamW for all other parameters (needs torch 2.9)
    :param weight_decay: Weight decay of all parameters but ``log_std``: decoupled for ``"adamw"`` and ``"muon"``, an L2
        penalty for the others. At least 0
    :param critic_learning_rate: Learning rate of the critic, whose gradient is then clipped separately; ``None`` for
        ``learning_rate``. At least 0, given in the same ways as ``learning_rate``. A features extractor that actor and
        critic share learns at the actor's rate
    :param lr_decay: Decay of the learning rates over the training: ``"constant"`` for none, ``"linear"`` or ``"cosine"``
    :param lr_min_fraction: Fraction of the initial learning rate that is left at the end of the decay, in [0, 1]
    :param lr_warmup: Fraction of the training during which the learning rates grow linearly from 0, in [0, 1)
    :param adaptive_lr_kl: KL divergence in nats that the learning rate is adapted to after each update; ``None`` for no
        adaptation. Greater than 0
    :param adaptive_lr_bounds: Smallest and largest value of the adapted learning rate, which also bound its initial value.
        Both greater than 0
    :param max_clip_fraction: Fraction of clipped samples in a minibatch above which the actor is frozen for the rest of
        the update, while the critic goes on learning; ``None`` for no limit. In [0, 1]
    :param accumulate_grad: Number of minibatches whose gradients make one step of the optimiser: as with a larger
        ``batch_size``, in less memory. At least 1
    :param bad_gradients: Reaction to a loss or gradient that is not finite: ``"raise"`` a ``ValueError``, or ``"skip"``
        the step of the optimiser
    :param backend: Engine that computes rollouts and updates: ``"eager"`` is PyTorch, equal to SB3's PPO to the bit;
        ``"fused"`` replaces Adam and the clipping of gradients by C; ``"native"`` computes MLP policies on the CPU in C;
        ``"compile"`` uses ``torch.compile``; ``"auto"`` is the first of native, fused and eager that supports the policy
        and the options. ``docs/options.md`` says what each engine supports, and how equal the results are
    :raises ValueError: if an argument is unknown or not valid, or a space is not supported
    """

    # SB3's own, so that it can load what is saved; where an option needs more, `with_action_distributions` takes ours.
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": ActorCriticPolicy,
        "CnnPolicy": ActorCriticCnnPolicy,
        "MultiInputPolicy": MultiInputActorCriticPolicy,
        "MlpTransformerPolicy": MlpTransformerPolicy,
        "CnnTransformerPolicy": CnnTransformerPolicy,
        "MultiInputTransformerPolicy": MultiInputTransformerPolicy,
    }

    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str,
        learning_rate: ScheduleLike = 3e-4,
        n_steps: int = 2048,
        batch_size: int = 64,
        n_epochs: int = 10,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: ScheduleLike = 0.2,
        clip_range_vf: ScheduleLike | None = None,
        normalize_advantage: bool = True,
        ent_coef: ScheduleLike = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        rollout_buffer_class: type[RolloutBuffer] | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        target_kl: float | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
        *,
        action_dist: ActionDist = "gaussian",
        deterministic_action: DeterministicAction = "mean",
        advantage_norm: AdvantageNorm = "minibatch",
        adv_ema_alpha: float = 0.05,
        adv_ema_warm_start: bool = True,
        adv_min_std: float = 1e-8,
        adv_clip: float = 4.0,
        adv_shift_mean: bool = True,
        bounds_coef: float = 0.0,
        bounds_limit: float = 1.1,
        vf_clip_mode: VfClipMode = "clip",
        surrogate: SurrogateName = "clip",
        dual_clip: float | None = None,
        kl_coef: float = 0.0,
        kl_target: float | None = None,
        vtrace: bool = False,
        vtrace_rho: float = 1.0,
        vtrace_c: float = 1.0,
        priority_alpha: float = 0.0,
        priority_beta: float = 0.4,
        priority_segment: int = 16,
        optimizer: OptimizerName = "adam",
        weight_decay: float = 0.0,
        critic_learning_rate: ScheduleLike | None = None,
        lr_decay: LrDecay = "constant",
        lr_min_fraction: float = 0.0,
        lr_warmup: float = 0.0,
        adaptive_lr_kl: float | None = None,
        adaptive_lr_bounds: tuple[float, float] = (1e-5, 1e-2),
        max_clip_fraction: float | None = None,
        accumulate_grad: int = 1,
        bad_gradients: BadGradients = "raise",
        backend: Backend = "auto",
        **unknown_options: NoReturn,
    ):
        arguments = dict(locals())
        check_known_options(unknown_options, _option_names(type(self)), type(self).__name__)
        check_device(device)
        if env is None and _init_setup_model:
            refuse("env", env, "give an environment, or the id of one")
        with assertions_as_value_errors():
            super().__init__(
                policy,
                env,
                learning_rate=learning_rate,  # type: ignore[arg-type]  # `_setup_lr_schedule` takes strings as well
                n_steps=n_steps,
                gamma=gamma,
                gae_lambda=gae_lambda,
                ent_coef=ent_coef,  # type: ignore[arg-type]  # a schedule as well
                vf_coef=vf_coef,
                max_grad_norm=max_grad_norm,
                use_sde=use_sde,
                sde_sample_freq=sde_sample_freq,
                rollout_buffer_class=rollout_buffer_class,
                rollout_buffer_kwargs=rollout_buffer_kwargs,
                stats_window_size=stats_window_size,
                tensorboard_log=tensorboard_log,
                policy_kwargs=policy_kwargs,
                verbose=verbose,
                device=device,
                seed=seed,
                _init_setup_model=False,
                supported_action_spaces=SUPPORTED_SPACES,
            )
        self.batch_size = batch_size
        self.n_epochs = n_epochs
        self.clip_range = clip_range
        self.clip_range_vf = clip_range_vf
        self.normalize_advantage = normalize_advantage
        self.target_kl = target_kl
        for name in OWN_OPTIONS:
            setattr(self, name, arguments[name])

        # What is learned beside the policy
        self.advantage_normalizer: AdvantageNormalizer | None = None
        self.kl_coefficient: KLAdaptive | None = None
        self.adaptive_lr: KLAdaptive | None = None
        self.n_skipped_updates = 0

        check_options(self)
        self._warn_about_truncated_minibatch()
        self._warn_about_single_step()
        if _init_setup_model:
            self._setup_model()

    # Set up

    def _setup_model(self) -> None:
        # `load` sets what it is given between `__init__` and here.
        check_options(self)
        if self.seed is not None:
            self.seed = int(self.seed)  # Gymnasium does not take NumPy's integers
        self._setup_schedules()
        given = self.policy_kwargs
        self.policy_kwargs = self._setup_action_distribution(given)
        if self.optimizer != "adam":
            # They are for another class than the one that the policy makes.
            self.policy_kwargs = {k: v for k, v in self.policy_kwargs.items() if k != "optimizer_kwargs"}
        try:
            with assertions_as_value_errors():
                super()._setup_model()
        finally:
            self.policy_kwargs = given
        self._setup_memory()
        self._setup_observations()
        self._setup_latents()
        self._setup_optimizer()
        self._setup_advantages()
        self._setup_engine()
        self._truncations = [] if self.vtrace else None

    def _setup_action_distribution(self, policy_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Take a policy that knows the law, where SB3's own does not, and say what it is to be told."""
        if self.action_dist == "gaussian":
            if policy_kwargs.keys() & {"mean_tanh", "learn_std"}:
                self.policy_class = with_action_distributions(self.policy_class)
            return policy_kwargs
        self.policy_class = with_action_distributions(self.policy_class)
        law = {"action_dist": self.action_dist, "deterministic_action": self.deterministic_action}
        return {**policy_kwargs, **law}

    def _setup_memory(self) -> None:
        """The buffer for a policy that reads sequences."""
        policy = self.policy
        if not isinstance(policy, TransformerPolicyMixin):
            return
        is_dict = isinstance(self.observation_space, spaces.Dict)
        buffer_class: Any = SequenceDictRolloutBuffer if is_dict else SequenceRolloutBuffer
        self.rollout_buffer = buffer_class(
            self.n_steps,
            in_float32(self.observation_space),
            self.action_space,
            device=self.device,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            n_envs=self.n_envs,
            context_length=policy.context_length,
            n_action_features=policy.n_action_features,
            keeps_rewards=policy.use_last_reward,
        )

    def _setup_observations(self) -> None:
        """Let the buffer keep them as the policy reads them; the reference's is SB3's."""
        buffer: Any = self.rollout_buffer
        if self.backend != "eager" and type(buffer) in (RolloutBuffer, DictRolloutBuffer):
            buffer.observation_space = in_float32(self.observation_space)
            buffer.reset()

    def _setup_latents(self) -> None:
        made = getattr(self.policy, "action_dist_name", "gaussian")
        if made != self.action_dist:
            refuse(
                "action_dist",
                self.action_dist,
                f"{self.policy_class.__name__} makes it {made!r}; give that, or change the class",
            )
        self._samples_latents = ACTION_DISTS[self.action_dist].is_bounded
        if self._samples_latents and self.action_space.dtype != np.float32:
            # The buffer would round them to the dtype of the actions.
            self.rollout_buffer.action_space = spaces.Box(-np.inf, np.inf, self.action_space.shape, np.float32)
            self.rollout_buffer.reset()

    def _maybe_recommend_cpu(self, mlp_class_name: str = "ActorCriticPolicy") -> None:
        super()._maybe_recommend_cpu(MlpPolicy.__name__ if self.policy_class is MlpPolicy else mlp_class_name)

    def _setup_schedules(self) -> None:
        self.clip_range = make_schedule("clip_range", self.clip_range, infinite=True)
        if self.clip_range_vf is not None:
            self.clip_range_vf = make_schedule("clip_range_vf", self.clip_range_vf, positive=True, infinite=True)
        if isinstance(self.ent_coef, str):
            # A number stays one: SB3's PPO can load it, and callbacks that change it go on working.
            self.ent_coef = make_schedule("ent_coef", self.ent_coef)
        self.kl_coefficient = None
        if self.kl_target is not None:
            bounds = (1e-6 * self.kl_coef, 1e6 * self.kl_coef)
            self.kl_coefficient = KLAdaptive(self.kl_coef, self.kl_target, factor=2.0, tolerance=1.5, bounds=bounds)

    def _setup_lr_schedule(self) -> None:
        learning_rate = make_schedule("learning_rate", self.learning_rate)
        if isinstance(self.learning_rate, str):
            # SB3's PPO would not load a zip with the string.
            self.learning_rate = learning_rate
        self.lr_schedule: Schedule = self._decayed(learning_rate)
        self.critic_lr_schedule: Schedule | None = None
        if self.critic_learning_rate is not None:
            self.critic_lr_schedule = self._decayed(make_schedule("critic_learning_rate", self.critic_learning_rate))
        self.adaptive_lr = None
        if self.adaptive_lr_kl is not None:
            low, high = self.adaptive_lr_bounds
            start = value_of(learning_rate, 1.0)
            self.adaptive_lr = KLAdaptive(start, self.adaptive_lr_kl, factor=1 / 1.5, tolerance=2.0, bounds=(low, high))
            self.lr_schedule = self.adaptive_lr

    def _decayed(self, schedule: FloatSchedule) -> Schedule:
        if self.lr_decay == "constant" and self.lr_warmup == 0:
            return schedule
        return DecaySchedule(schedule, self.lr_decay, self.lr_min_fraction, self.lr_warmup)

    def _setup_optimizer(self) -> None:
        for name in ("critic_learning_rate", "max_clip_fraction"):
            if getattr(self, name) is not None and not critic_parameters(self.policy):
                remedy = f"{self.policy_class.__name__} has no critic apart from its actor; give None"
                refuse(name, getattr(self, name), remedy)
        if self.optimizer == "adam" and self.weight_decay == 0 and self.critic_learning_rate is None:
            return  # the policy's own
        self.policy.optimizer = make_optimizer(
            self.policy,
            self.optimizer,
            self.weight_decay,
            own_critic=self.critic_learning_rate is not None,
            optimizer_kwargs=self.policy_kwargs.get("optimizer_kwargs"),
        )

    def _setup_advantages(self) -> None:
        self.advantage_normalizer = None
        if self.normalize_advantage and self.advantage_norm == "ema":
            self.advantage_normalizer = AdvantageNormalizer(
                self.adv_ema_alpha, self.adv_ema_warm_start, self.adv_min_std, self.adv_clip, self.adv_shift_mean
            )

    def _setup_engine(self) -> None:
        """Refuse a backend that does not support the policy and the options; engines are made when they are needed."""
        # The engines that were used, for the backend may be changed and changed back
        self._engines: dict[str, Engine] = {}
        backend, reasons = choose_backend(self.backend, self._engine_setup())
        if self.backend in reasons:
            refuse("backend", self.backend, f'{reasons[self.backend]}; give "auto"')
        if self.verbose >= 1 and self.backend != "eager":
            print(f"Backend: {backend}" + (f" (not native: {reasons['native']})" if "native" in reasons else ""))

    def _engine_setup(self) -> Setup:
        return Setup(self.policy, self.rollout_buffer, has_extra_loss=self._extra_actor_loss() is not None)

    def _extra_actor_loss(self) -> ExtraActorLoss | None:
        """The loss of a subclass, or of an instance; ``None`` if there is none."""
        own = getattr(self.extra_actor_loss, "__func__", None) is not PPOExt.extra_actor_loss
        return self.extra_actor_loss if own else None

    def _find_engine(self) -> Engine:
        """The engine for the backend and the policy as they are now."""
        backend, _ = choose_backend(self.backend, self._engine_setup())
        engine = self._engines.get(backend)
        if engine is None or not engine.is_for(self.policy):
            engine = self._engines[backend] = ENGINES[backend](self.policy)
        return engine

    def _warn_about_truncated_minibatch(self) -> None:
        if self.env is None:
            return
        buffer_size = self.env.num_envs * self.n_steps
        if buffer_size % self.batch_size > 0:
            warnings.warn(
                f"You have specified a mini-batch size of {self.batch_size},"
                f" but because the `RolloutBuffer` is of size `n_steps * n_envs = {buffer_size}`,"
                f" after every {buffer_size // self.batch_size} untruncated mini-batches,"
                f" there will be a truncated mini-batch of size {buffer_size % self.batch_size}\n"
                f"We recommend using a `batch_size` that is a factor of `n_steps * n_envs`.\n"
                f"Info: (n_steps={self.n_steps} and n_envs={self.env.num_envs})",
                stacklevel=3,
            )

    def _warn_about_single_step(self) -> None:
        if self.env is None or (self.kl_coef == 0 and self.adaptive_lr_kl is None):
            return
        if self.n_epochs == 1 and self.batch_size * self.accumulate_grad >= self.env.num_envs * self.n_steps:
            warnings.warn(
                "`kl_coef`, `kl_target` and `adaptive_lr_kl` see how far the policy has moved before each step of the"
                " optimizer, and these options give one step per update, before which it has not moved: they have no effect."
                f" Raise n_epochs={self.n_epochs}, or lower batch_size={self.batch_size}.",
                stacklevel=3,
            )

    def _get_policy_from_name(self, policy_name: str) -> type[BasePolicy]:
        if policy_name not in self.policy_aliases:
            refuse("policy", policy_name, f"the names are {', '.join(self.policy_aliases)}; a class works as well")
        return super()._get_policy_from_name(policy_name)

    @staticmethod
    def _wrap_env(env: GymEnv, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        # Old Gym's spaces are another type, which SB3 converts before it checks them.
        if isinstance(observation_space := getattr(env, "observation_space", None), spaces.Space):
            check_observation_space(observation_space)
        if isinstance(action_space := getattr(env, "action_space", None), spaces.Space):
            check_action_space(action_space)
        if not isinstance(env, VecEnv):
            # As SB3 does, with an environment that copies less
            env = _patch_env(env)
            if monitor_wrapper and not is_wrapped(env, Monitor):
                if verbose >= 1:
                    print("Wrapping the env with a `Monitor` wrapper")
                env = Monitor(env)
            if verbose >= 1:
                print("Wrapping the env in a DummyVecEnv.")
            single: Any = env
            env = FastDummyVecEnv([lambda: single])
        return OnPolicyAlgorithm._wrap_env(env, verbose, monitor_wrapper)

    # Rollout and update

    def _make_actor(self, rollout_buffer: RolloutBuffer, config: RolloutConfig) -> Actor:
        return self._find_engine().make_actor(rollout_buffer, config)

    def train(self) -> None:
        """
        Update policy using the currently gathered rollout buffer.
        """
        start = time.perf_counter()
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        config, result = self._update_config(), UpdateResult(Metrics())
        rollout = Rollout(self.rollout_buffer, self._last_obs, self._last_episode_starts, self._truncations, self.gamma)
        try:
            self._find_engine().update(rollout, config, self.advantage_normalizer, result)
        finally:
            self._n_updates += result.n_epochs
            self.n_skipped_updates += result.n_skipped
        self._log_update(config, result)
        if self.kl_coefficient is not None:
            self.kl_coefficient.update(result.metrics.mean("kl"))
        if self.adaptive_lr is not None:
            self.adaptive_lr.update(result.metrics.mean("approx_kl"))
        self.logger.record("time/update_seconds", time.perf_counter() - start)

    def _update_config(self) -> UpdateConfig:
        """The options as they are at this moment of the training."""
        progress = self._current_progress_remaining
        done = min(max(1 - progress, 0.0), 1.0)
        given = {name: getattr(self, name) for name in OF_UPDATE}
        given |= {
            "loss": self._loss_config(progress),
            "priority_beta": self.priority_beta + (1 - self.priority_beta) * done,
            "discrete_actions": isinstance(self.action_space, spaces.Discrete),
            "samples_latents": self._samples_latents,
            "extra_actor_loss": self._extra_actor_loss(),
        }
        return UpdateConfig(**given)

    def _loss_config(self, progress: float) -> LossConfig:
        # The last rollout may end past the end; SB3's own schedules see that, ours do not.
        coefficients = {
            name: value_of(getattr(self, loss.coef), max(progress, 0.0)) for name, loss in AUXILIARY_LOSSES.items()
        }
        if self.kl_coefficient is not None:
            coefficients["kl"] = self.kl_coefficient.value
        return LossConfig(
            clip_range=value_of(self.clip_range, progress),
            clip_range_vf=None if self.clip_range_vf is None else value_of(self.clip_range_vf, progress),
            ent_coef=value_of(self.ent_coef, max(progress, 0.0)),
            vf_coef=self.vf_coef,
            surrogate=self.surrogate,
            dual_clip=self.dual_clip,
            vf_clip_mode=self.vf_clip_mode,
            bounds_limit=self.bounds_limit,
            action_bounds=self._action_bounds(),
            auxiliary={name: value for name, value in coefficients.items() if value != 0},
        )

    def _action_bounds(self) -> tuple[th.Tensor, th.Tensor] | None:
        """Bounds of the actions in the buffer, flat: of a squashed policy -1 and 1, also for what it squashes."""
        space = self.action_space
        if not isinstance(space, spaces.Box):
            return None
        bounds = (-np.ones_like(space.low), np.ones_like(space.high)) if self.policy.squash_output else (space.low, space.high)
        low, high = (th.tensor(bound.flatten(), dtype=th.float32, device=self.device) for bound in bounds)
        return low, high

    def _log_update(self, config: UpdateConfig, result: UpdateResult) -> None:
        """Record an update, SB3's keys first."""
        record, loss, metrics = self.logger.record, config.loss, result.metrics
        for name, value in sb3_metrics(metrics, self.policy, self.rollout_buffer).items():
            record(f"train/{name}", value)
        record("train/n_updates", self._n_updates, exclude="tensorboard")
        record("train/clip_range", loss.clip_range)
        if loss.clip_range_vf is not None:
            record("train/clip_range_vf", loss.clip_range_vf)
        for name, value in further_metrics(metrics, self.policy, self.rollout_buffer, config).items():
            record(name if "/" in name else f"train/{name}", value)
        for name, value in self._options_to_log(config, result).items():
            record(name, value)

    def _options_to_log(self, config: UpdateConfig, result: UpdateResult) -> dict[str, Any]:
        """Options that change during the training, and what options have counted or learned."""
        logged: dict[str, Any] = {}
        if not is_constant(self.ent_coef):
            logged["train/ent_coef"] = config.loss.ent_coef
        if "kl" in config.loss.auxiliary:
            logged["train/kl_coef"] = config.loss.auxiliary["kl"]
        if config.target_kl is not None:
            logged["train/epochs"] = result.n_epochs
        if config.priority_alpha > 0:
            logged["train/priority_beta"] = config.priority_beta
        if config.bad_gradients == "skip":
            logged["train/skipped_updates"] = self.n_skipped_updates
        if self.advantage_normalizer is not None:
            logged |= {"adv/ema_mean": self.advantage_normalizer.mean, "adv/ema_std": self.advantage_normalizer.std}
        return logged

    def _update_learning_rate(self, optimizers: list[th.optim.Optimizer] | th.optim.Optimizer) -> None:
        super()._update_learning_rate(optimizers)
        if self.critic_lr_schedule is None:
            return
        # The last rollout may end past the end.
        learning_rate = self.critic_lr_schedule(max(self._current_progress_remaining, 0.0))
        self.logger.record("train/critic_learning_rate", learning_rate)
        for group in self.policy.optimizer.param_groups:
            if group.get("role") == "critic":
                group["lr"] = learning_rate

    def extra_actor_loss(
        self, rollout_data: RolloutBufferSamples, distribution: Distribution
    ) -> tuple[th.Tensor | float, dict[str, th.Tensor | float]]:
        """
        A term that a subclass adds to the loss, for instance for symmetry or imitation. Called for every minibatch.

        :param rollout_data: The minibatch, SB3's ``RolloutBufferSamples``, with the advantages as the policy loss uses them
        :param distribution: The policy's for its observations, from which the gradient flows
        :return: A scalar to minimise, and what to log: the mean over the update appears under ``train/`` and the name
            (a name with a slash stays as it is)
        :raises ValueError: if a name is one that PPOExt logs itself
        """
        return 0.0, {}

    def learn(
        self: SelfPPOExt,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "PPOExt",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfPPOExt:
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )

    # Save and load

    @classmethod
    def load(
        cls: type[SelfPPOExt],
        path: SavedModel,
        env: GymEnv | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **kwargs: Any,
    ) -> SelfPPOExt:
        """
        Load the model from a zip-file, saved by ``PPOExt`` or by ``stable_baselines3.PPO``.
        Warning: ``load`` re-creates the model from scratch, it does not update it in-place!
        For an in-place load use ``set_parameters`` instead.

        :param path: path to the file (or a file-like) where to load the agent from
        :param env: the new environment to run the loaded model on
            (can be None if you only need prediction from a trained model) has priority over any saved environment
        :param device: Device on which the code should run.
        :param custom_objects: Dictionary of objects to replace upon loading.
        :param print_system_info: Whether to print system info from the saved model and the current system info
        :param force_reset: Force call to ``reset()`` before training to avoid unexpected behavior.
        :param kwargs: options to change when loading
        :return: new model instance with loaded parameters
        :raises ValueError: if the zip is damaged or of another algorithm, or an option is unknown or not valid
        """
        check_device(device)
        saved = check_saved_ppo(path, cls.policy_aliases.values())
        check_known_options(kwargs, saved.keys() | _option_names(cls), f"{cls.__name__}.load")
        replaced = read_renamed(saved)
        law, policy_kwargs = _law_and_policy_kwargs(saved, kwargs.get("policy_kwargs"))
        if policy_kwargs is not None:
            kwargs, replaced["policy_kwargs"] = {**law, **kwargs}, policy_kwargs
        if custom_objects is None or isinstance(custom_objects, dict):  # SB3 refuses anything else
            custom_objects = {**replaced, **(custom_objects or {})}
        if "stats_window_size" in kwargs:
            # The only option whose attribute has another name
            kwargs["_stats_window_size"] = kwargs.pop("stats_window_size")
        return super().load(path, env, device, custom_objects, print_system_info, force_reset, **kwargs)

    def set_parameters(
        self, load_path_or_dict: str | TensorDict, exact_match: bool = True, device: th.device | str = "auto"
    ) -> None:
        """
        Load parameters from a zip-file of ``PPOExt`` or ``stable_baselines3.PPO``, or from a nested dictionary
        (see ``get_parameters``).

        :param load_path_or_dict: Location of the saved data (path or file-like, see ``save``), or a dictionary that
            maps the names of objects to their state-dictionaries
        :param exact_match: If True, the given parameters should include parameters for each module and each of their
            parameters, otherwise raises an Exception. If set to False, this can be used to update only specific
            parameters.
        :param device: Device on which the code should run.
        :raises ValueError: if the zip is damaged or of another algorithm, or the names do not match
        """
        if isinstance(load_path_or_dict, dict):
            parameters: dict[str, Any] = dict(load_path_or_dict)
        else:
            check_saved_ppo(load_path_or_dict, self.policy_aliases.values())
            parameters = dict(load_from_zip_file(load_path_or_dict, device=device, load_data=False)[1])
        check_parameters_are_of(parameters.get("policy", {}), self.action_dist)
        if "policy.optimizer" in parameters:
            parameters["policy.optimizer"] = adopt_state(self.policy, parameters["policy.optimizer"])
        for name in LEARNED:
            learner = getattr(self, name)
            if learner is None:
                parameters.pop(name, None)  # the option is off here
            elif exact_match:
                parameters.setdefault(name, learner.state_dict())  # it was off there
        super().set_parameters(parameters, exact_match, device)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which make engines of their own: these are bound to the memory of one policy."""
        return {**vars(self), "_engines": {}}

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        state_dicts, variables = super()._get_torch_save_params()
        return [*state_dicts, *(name for name in LEARNED if getattr(self, name) is not None)], variables

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), *LEARNED, "_truncations", "_samples_latents", "_engines"]


def _law_and_policy_kwargs(saved: dict[str, Any], given: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """
    The law that a zip has among its ``policy_kwargs``, where SB3's own algorithms have it with our policies, and what the
    ``policy_kwargs`` are to be instead of the saved ones: without it, and with a standard deviation that is not to be learned
    any more. SB3 itself lets nobody change them. ``None`` if they stay.
    """
    law_names = {"action_dist", "deterministic_action"}
    if given is None and not saved.get("policy_kwargs", {}).keys() & law_names:
        return {}, None
    policy_kwargs = read_policy_kwargs(saved)
    law: dict[str, Any] = {name: policy_kwargs.pop(name) for name in policy_kwargs.keys() & law_names}
    return law, given if fixes_std(policy_kwargs, given) else policy_kwargs


def _option_names(algorithm: type[PPOExt]) -> set[str]:
    """Every named argument of the constructors of the class and its parents, for a subclass may pass some on."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    constructors = [inspect.signature(cls.__init__) for cls in algorithm.__mro__ if issubclass(cls, PPOExt)]
    parameters: Iterable[inspect.Parameter] = (p for signature in constructors for p in signature.parameters.values())
    return {p.name for p in parameters if p.kind in kinds} - {"self"}
