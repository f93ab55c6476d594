"""The constructor of PPOExt, where an option is told: type, default, meaning, and the attribute that it becomes."""

import functools
import inspect
import warnings
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, Literal, NoReturn, TypeAlias

import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv

from sb3_ppo_ext.common.schedules import AdaptiveLrRule, LrDecay, ScheduleLike
from sb3_ppo_ext.common.type_aliases import Kwargs
from sb3_ppo_ext.common.validation import (
    SUPPORTED_SPACES,
    assertions_as_value_errors,
    check_known_options,
    unknown_environments_as_value_errors,
)
from sb3_ppo_ext.distributed.launch import Distributed, find_launch, own_device
from sb3_ppo_ext.distributions import ActionDist, DeterministicAction
from sb3_ppo_ext.engines.registry import Backend
from sb3_ppo_ext.envs.normalizer import NormalizeFreq
from sb3_ppo_ext.options.arguments import check_arguments, warn_about_minibatches, without_device_line
from sb3_ppo_ext.options.places import place_of
from sb3_ppo_ext.options.signatures import printed_with_the_class
from sb3_ppo_ext.policies.mixed_precision import AmpDtype
from sb3_ppo_ext.update.config import AdvantageNorm, BadGradients
from sb3_ppo_ext.update.losses import SurrogateName, VfClipMode
from sb3_ppo_ext.update.optimizers import OptimizerName

PolicyName: TypeAlias = Literal[
    "MlpPolicy",
    "CnnPolicy",
    "MultiInputPolicy",
    "MlpTransformerPolicy",
    "CnnTransformerPolicy",
    "MultiInputTransformerPolicy",
    "MlpLstmPolicy",
    "CnnLstmPolicy",
    "MultiInputLstmPolicy",
]


class ConfiguredPPO(OnPolicyAlgorithm):
    """
    An on-policy algorithm with the arguments of PPOExt, which are its attributes. The table of options in ``table.py`` takes
    the type, the default and the first sentence of an option from the constructor.
    """

    @printed_with_the_class
    def __init__(
        self,
        policy: PolicyName | str | type[ActorCriticPolicy],
        env: GymEnv | str,
        learning_rate: ScheduleLike = 3e-4,
        n_steps: int = 2048,
        batch_size: int = 64,
        n_epochs: int = 10,
        gamma: float | str = 0.99,
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
        rollout_buffer_kwargs: Kwargs | None = None,
        target_kl: float | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: Kwargs | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
        *,
        action_dist: ActionDist = "gaussian",
        deterministic_action: DeterministicAction = "mean",
        noise_color: float = 0.0,
        action_masking: bool = False,
        action_mask_key: str | None = None,
        normalize_obs: bool | list[str] = False,
        normalize_reward: bool = False,
        clip_obs: float = 10.0,
        clip_reward: float = 10.0,
        normalize_freq: NormalizeFreq = "step",
        advantage_norm: AdvantageNorm = "minibatch",
        adv_ema_alpha: float = 0.05,
        adv_ema_warm_start: bool = True,
        adv_min_std: float = 1e-8,
        adv_clip: float = 4.0,
        adv_shift_mean: bool = True,
        bounds_coef: float = 0.0,
        bounds_limit: float = 1.1,
        vf_clip_mode: VfClipMode = "clip",
        normalize_value: bool = False,
        surrogate: SurrogateName = "clip",
        dual_clip: float | None = None,
        kl_coef: float = 0.0,
        kl_target: float | None = None,
        auxiliary_losses: dict[str, Any] | None = None,
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
        adaptive_lr_kl: ScheduleLike | None = None,
        adaptive_lr_rule: AdaptiveLrRule = "threshold",
        adaptive_lr_bounds: tuple[float, float] = (1e-5, 1e-2),
        max_clip_fraction: float | None = None,
        accumulate_grad: int = 1,
        bad_gradients: BadGradients = "raise",
        backend: Backend = "auto",
        native_threads: int = 1,
        amp_dtype: AmpDtype | None = None,
        distributed: Distributed = "auto",
        **unknown_options: NoReturn,
    ):
        """
        :param policy: The policy model to use, one of the names of :data:`PolicyName`, or a class
        :param env: Environment, vectorised or not, or an id, as in :class:`stable_baselines3.PPO`
        :param learning_rate: Learning rate of the optimiser. At least 0: a number, a function of the remaining progress (from
            1 to 0), ``"lin_3e-4"`` for a linear decay to 0, or ``"hold_3e-4"`` for one in the second half of the training
        :param n_steps: Number of steps to run for each environment per update. At least 1 (the rollout holds ``n_steps *
            n_envs`` samples, which must be more than 1 with ``normalize_advantage``)
        :param batch_size: Minibatch size. At least 1, and at least 2 with ``normalize_advantage``
        :param n_epochs: Number of passes over the rollout in each update. At least 1
        :param gamma: Discount factor. In [0, 1], or ``"auto"`` for one that looks a fifth of an episode ahead: ``1 - 5 / n``,
            at least 0.95 and at most 0.995, where n is the time limit of the environments, and 0.99 if it is not known
            (`Hansen et al., 2024 <https://arxiv.org/abs/2310.16828>`_)
        :param gae_lambda: Factor for the trade-off of bias and variance in Generalized Advantage Estimation (GAE). In [0, 1]
        :param clip_range: Clipping parameter of the probability ratio. At least 0: a number, a function of the remaining
            progress, or ``"lin_0.2"``
        :param clip_range_vf: Clipping parameter of the value function, in units of the return; ``None`` for no clipping.
            Greater than 0, given in the same ways as ``clip_range``
        :param normalize_advantage: Whether to normalize the advantages. See ``advantage_norm``
        :param ent_coef: Coefficient of the entropy in the loss. At least 0, given in the same ways as ``learning_rate``
        :param vf_coef: Coefficient of the value loss. At least 0
        :param max_grad_norm: Maximum norm of the gradient, which is scaled down if it is larger. At least 0 (``float("inf")``
            for no limit)
        :param use_sde: Whether to use generalized State-Dependent Exploration (gSDE) instead of independent noise at each step
        :param sde_sample_freq: An integer, as in :class:`stable_baselines3.PPO`
        :param rollout_buffer_class: As in :class:`stable_baselines3.PPO`
        :param rollout_buffer_kwargs: As in :class:`stable_baselines3.PPO`
        :param target_kl: Stop the update early when the estimated KL divergence exceeds 1.5 times this value; ``None`` for no
            limit. At least 0
        :param stats_window_size: Number of episodes over which the logged success rate, mean episode length and mean reward
            are averaged. At least 0
        :param tensorboard_log: As in :class:`stable_baselines3.PPO`
        :param policy_kwargs: Additional keyword arguments to be passed to the policy on creation
        :param verbose: As in :class:`stable_baselines3.PPO`
        :param seed: Seed of the pseudo-random number generators. From 0 to 2**32 - 1
        :param device: Device (cpu, cuda, ...) on which the code should be run. Setting it to auto, the code will be run where
            it is fastest: on a GPU if there is one and the policy reads images or has wide layers (more than 2 million
            parameters) or large minibatches, on the device of environments that step in tensors, and otherwise on the CPU.
        :param _init_setup_model: As in :class:`stable_baselines3.PPO`

        The options that PPOExt adds are keyword-only, and their defaults are equivalent to SB3's PPO. ``docs/options.md``
        explains when to use them, with the formulas; ``docs/options_reference.md`` is a table of all options.

        :param action_dist: Distribution of the actions in a ``Box``, or in those of a hybrid action space: ``"gaussian"`` is
            SB3's, whose samples are clipped to the bounds; ``"squashed_gaussian"`` (the tanh of a Gaussian) and ``"beta"``
            stay within the bounds
        :param deterministic_action: Action of a Beta distribution that ``predict(..., deterministic=True)`` returns. Its
            ``"mean"`` or its ``"mode"``
        :param noise_color: How much the noise of a Gaussian, squashed or not, is correlated over time while rollouts are
            collected: its power at the frequency f goes as ``1/f^noise_color``. From 0 (white, as in SB3) to 2; 1 is pink, and
            0.5 is what https://arxiv.org/abs/2312.11091 recommends
        :param action_masking: Whether the environments say which actions are valid, so that the policy chooses only
            among these (https://arxiv.org/abs/2006.14171). For ``Discrete``, ``MultiDiscrete`` and ``MultiBinary`` action
            spaces. A mask has one number for each choice of each action, 0 for those that are not valid
        :param action_mask_key: Key of the mask in observations that are dictionaries; ``None`` for a method ``action_masks``
            of the environments. The latter as for sb3-contrib's MaskablePPO. The policy does not read the mask as a feature
        :param normalize_obs: Whether the model normalizes observations by their running mean and standard deviation, as
            ``VecNormalize`` does; for ``Dict`` observations also the keys of those that it normalizes. Environments,
            callbacks, ``predict`` and all tools have the observations as they are
        :param normalize_reward: Whether the model is trained with rewards divided by the running standard deviation of the
            discounted return, as with ``VecNormalize``
        :param clip_obs: Largest absolute value of a normalized observation. Greater than 0
        :param clip_reward: Largest absolute value of a normalized reward. Greater than 0
        :param normalize_freq: When the statistics change: at each ``"step"``, as those of ``VecNormalize``, or after each
            ``"rollout"``. The environments then need not wait for each other within a rollout. In the first rollout they
            change at each step
        :param advantage_norm: Statistics that ``normalize_advantage`` normalizes by: those of each ``"minibatch"``, those of
            the ``"rollout"``, or exponential moving averages over the rollouts (``"ema"``)
        :param adv_ema_alpha: Weight of the newest rollout in the moving averages. With ``advantage_norm="ema"``; in (0, 1]
        :param adv_ema_warm_start: Whether the moving averages are corrected for their bias at the start and include a rollout
            before it is normalized; ``False`` is ProtoMotions' scheme
        :param adv_min_std: Smallest standard deviation that advantages are divided by, in units of the return. With
            ``advantage_norm="ema"``; greater than 0
        :param adv_clip: Largest absolute value of a normalized advantage, to which larger ones are clipped. With
            ``advantage_norm="ema"``; greater than 0
        :param adv_shift_mean: Whether the mean is subtracted from the advantages. With ``advantage_norm="ema"``
        :param bounds_coef: Coefficient of the bounds loss, which penalizes mean actions outside the bounds of a ``Box``. At
            least 0
        :param bounds_limit: Absolute value of the mean action above which the bounds loss acts, where 1 is the bound of the
            action space. At least 0. With ``action_dist="squashed_gaussian"`` it limits the mean before the tanh, where 1.1 is
            80 % of the bound
        :param vf_clip_mode: Value loss with ``clip_range_vf``: ``"clip"`` is the error of the clipped value (SB3), ``"max"``
            the larger of the clipped and the unclipped error (PPO2)
        :param normalize_value: Whether the critic predicts returns normalized by their running mean and standard deviation
            (https://arxiv.org/abs/1602.07714), which are also the unit of ``clip_range_vf``. All values that can be read, such
            as those of ``policy.predict_values``, are in the units of the return
        :param surrogate: Policy loss: ``"clip"`` is PPO's clipped surrogate, ``"spo"`` that of Simple Policy Optimization
            (https://arxiv.org/abs/2401.16025)
        :param dual_clip: Bound of the policy loss for negative advantages, as a multiple of the advantage
            (https://arxiv.org/abs/1912.09729); ``None`` for no bound. Greater than 1, for ``surrogate="clip"``
        :param kl_coef: Coefficient of the KL penalty, KL(old policy || new policy). At least 0
        :param kl_target: KL divergence in nats that ``kl_coef`` is adapted to after each update; ``None`` for a fixed
            coefficient. Greater than 0
        :param auxiliary_losses: Further losses of the policy by name, each with its coefficient or a dictionary of its keyword
            arguments: mirror symmetry, or smooth actions; ``None`` for none. The names are ``"mirror"``,
            ``"mirror_augmentation"`` (https://arxiv.org/abs/1801.08093, https://arxiv.org/abs/2403.04359), ``"caps_temporal"``
            and ``"caps_spatial"`` (https://arxiv.org/abs/2012.06644), see ``docs/auxiliary_losses.md``
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
        :param lr_decay: Decay of the learning rates over the training. ``"constant"`` for none, ``"linear"`` or ``"cosine"``
        :param lr_min_fraction: Fraction of the initial learning rate that is left at the end of the decay. In [0, 1]
        :param lr_warmup: Fraction of the training, at least one update, during which the learning rates grow linearly. In [0,
            1); 0 for no warm-up
        :param adaptive_lr_kl: KL divergence in nats that the learning rate is adapted to after each update; ``None`` for no
            adaptation. Greater than 0, given in the same ways as ``learning_rate``
        :param adaptive_lr_rule: How the learning rate follows the KL divergence: ``"threshold"``, by a factor of 1.5 if it is
            more than twice or less than half of ``adaptive_lr_kl``, or ``"proportional"``, always, by the square root of their
            ratio, at most 1.5
        :param adaptive_lr_bounds: Smallest and largest value of the adapted learning rate, which also bound its initial value.
            Both greater than 0
        :param max_clip_fraction: Fraction of clipped samples in a minibatch above which the actor is frozen for the rest of
            the update, while the critic keeps learning; ``None`` for no limit. In [0, 1]
        :param accumulate_grad: Number of minibatches whose gradients make one step of the optimiser: as with a larger
            ``batch_size``, in less memory. At least 1
        :param bad_gradients: Reaction to a loss or gradient that is not finite: ``"raise"`` a ``ValueError``, or ``"skip"``
            the step of the optimiser
        :param backend: Engine that computes rollouts and updates: ``"eager"`` is PyTorch, on the CPU equal to SB3's PPO bit
            for bit; ``"fused"`` replaces Adam and the clipping of gradients by C; ``"native"`` computes MLP policies on the
            CPU in C, and may draw other random numbers; ``"device"`` keeps rollouts and updates on the device of the policy;
            ``"compile"`` uses ``torch.compile``; ``"auto"`` is the first of native, device (on a GPU, or with tensor
            environments), fused and eager that supports the policy and the options. ``docs/engines.md`` says what each engine
            supports, and how equal the results are
        :param native_threads: Number of threads that compute large networks in updates with ``backend="native"``; it changes
            only the speed, and has no effect with another engine. Results are equal bit for bit for every number of threads
        :param amp_dtype: Type in which the networks compute, ``"bfloat16"`` or ``"float16"``, for GPUs; action distributions,
            losses, parameters and the optimiser stay in float32; ``None`` for float32 everywhere. With ``"float16"``, the loss
            is scaled by a factor that adapts (https://arxiv.org/abs/1710.03740)
        :param distributed: Whether several processes that torchrun has started train one model together (``"auto"``), each
            with environments of its own, or independent ones (``"off"``). ``batch_size`` is then the number of samples of all
            of them
        :raises ValueError: if an argument is unknown or not valid, or a space is not supported
        """
        check_known_options(unknown_options, option_names(type(self)), type(self).__name__, place_of)
        check_arguments(
            policy, env, use_sde, rollout_buffer_kwargs, tensorboard_log, verbose, device, needs_env=_init_setup_model
        )
        if action_mask_key is not None and isinstance(policy, str):
            # By name, SB3 refuses policies that read no dictionaries, before it is known whether they have to.
            policy = self._get_policy_from_name(policy)  # type: ignore[assignment]
        launch = find_launch(distributed)
        # Only rank 0 prints and logs.
        verbose, tensorboard_log = (verbose, tensorboard_log) if launch.rank == 0 else (0, None)
        device = own_device(device, launch)
        is_automatic = isinstance(device, str) and device == "auto"
        device_line = without_device_line() if is_automatic and verbose >= 1 else nullcontext()
        with assertions_as_value_errors(), unknown_environments_as_value_errors(env), device_line:
            super().__init__(
                policy,
                env,
                learning_rate=learning_rate,  # type: ignore[arg-type]  # `_setup_lr_schedule` takes strings as well
                n_steps=n_steps,
                gamma=gamma,  # type: ignore[arg-type]  # `_choose_discount` makes it a number.
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
                device="cpu" if is_automatic else device,
                seed=seed,
                _init_setup_model=False,
                supported_action_spaces=(*SUPPORTED_SPACES, spaces.Dict, spaces.Tuple),
            )
        self._device_is_automatic = is_automatic
        self.batch_size = batch_size
        self.n_epochs = n_epochs
        self.ent_coef: Any = ent_coef  # SB3 takes it for a float.
        self.clip_range = clip_range
        self.clip_range_vf = clip_range_vf
        self.normalize_advantage = normalize_advantage
        self.target_kl = target_kl
        self.action_dist = action_dist
        self.deterministic_action = deterministic_action
        self.noise_color = noise_color
        self.action_masking = action_masking
        self.action_mask_key = action_mask_key
        self.normalize_obs = normalize_obs
        self.normalize_reward = normalize_reward
        self.clip_obs = clip_obs
        self.clip_reward = clip_reward
        self.normalize_freq = normalize_freq
        self.advantage_norm = advantage_norm
        self.adv_ema_alpha = adv_ema_alpha
        self.adv_ema_warm_start = adv_ema_warm_start
        self.adv_min_std = adv_min_std
        self.adv_clip = adv_clip
        self.adv_shift_mean = adv_shift_mean
        self.bounds_coef = bounds_coef
        self.bounds_limit = bounds_limit
        self.vf_clip_mode = vf_clip_mode
        self.normalize_value = normalize_value
        self.surrogate = surrogate
        self.dual_clip = dual_clip
        self.kl_coef = kl_coef
        self.kl_target = kl_target
        self.auxiliary_losses = auxiliary_losses
        self.vtrace = vtrace
        self.vtrace_rho = vtrace_rho
        self.vtrace_c = vtrace_c
        self.priority_alpha = priority_alpha
        self.priority_beta = priority_beta
        self.priority_segment = priority_segment
        self.optimizer = optimizer
        self.weight_decay = weight_decay
        self.critic_learning_rate = critic_learning_rate
        self.lr_decay = lr_decay
        self.lr_min_fraction = lr_min_fraction
        self.lr_warmup = lr_warmup
        self.adaptive_lr_kl = adaptive_lr_kl
        self.adaptive_lr_rule = adaptive_lr_rule
        self.adaptive_lr_bounds = adaptive_lr_bounds
        self.max_clip_fraction = max_clip_fraction
        self.accumulate_grad = accumulate_grad
        self.bad_gradients = bad_gradients
        self.backend = backend
        self.native_threads = native_threads
        self.amp_dtype = amp_dtype
        self.distributed = distributed

        if str(device).startswith("cuda") and self.device.type == "cpu":
            warnings.warn(f"`device={device!r}`: there is no CUDA here, so the model is on the CPU, as in SB3.", stacklevel=2)
        if not _init_setup_model:
            self._check_options()
        else:
            self._setup_model()
            warn_about_minibatches(self)

    @abstractmethod
    def _check_options(self) -> None:
        """Check all options, and that they can be combined: the first step of the set-up."""


@functools.cache
def option_names(algorithm: type[ConfiguredPPO]) -> frozenset[str]:
    """
    :param algorithm: ``PPOExt`` or a subclass, which may pass keyword arguments on to its parents
    :return: Names of all arguments of the constructors of the class and its parents
    """
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    constructors = [cls.__init__ for cls in algorithm.__mro__ if issubclass(cls, ConfiguredPPO)]
    parameters: Iterable[inspect.Parameter] = (p for each in constructors for p in inspect.signature(each).parameters.values())
    return frozenset(p.name for p in parameters if p.kind in kinds and p.name != "self")
