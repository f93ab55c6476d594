"""
The search space of ``-optimize``: the hyperparameters that RL Zoo and Optuna try for ``ppo_ext``.

A trial samples a few numbers; one function converts them to hyperparameters, during tuning and later with ``--trial-id``.
"""

import math
from typing import TYPE_CHECKING

from torch import nn

from sb3_ppo_ext.common.type_aliases import Kwargs

if TYPE_CHECKING:
    import optuna

# Range of the steps in a rollout of all environments together, and range of their binary logarithm in each environment
ROLLOUTS, N_STEPS_POW = (2**7, 2**15), (3, 12)
# Minimum number of updates in a training run, unless even the shortest rollouts are too long for it
MIN_UPDATES = 10
SMALLEST_MINIBATCH = 32
# Sizes of the hidden layers by kind. A residual block of SimBa has eight times as many weights as a layer of its size.
LAYERS = {"tiny": [64], "small": [64, 64], "medium": [256, 256]}
NETWORKS = {"mlp": LAYERS, "layer_norm": LAYERS, "simba": {"tiny": [32], "small": [64], "medium": [128]}}
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}
ACTION_DISTS = ("gaussian", "gsde", "squashed_gaussian", "beta")
BOUNDS_COEFS = (0.0, 0.01, 0.1)


def sample_ppo_ext_params(
    trial: "optuna.Trial", n_actions: int, n_envs: int, additional_args: dict[str, object] | None = None
) -> Kwargs:
    """
    Sample PPO's hyperparameters and those of PPOExt: the action distribution (for a ``Box``), the normalization of advantages
    and values, the control of the KL divergence, a decay of the learning rate, a separate learning rate of the critic, the
    kind of the networks, and for history-based policies the size of the transformer or of the RNN. No minibatch is larger than
    a rollout. What would have no effect is not sampled: with one minibatch, statistics of the advantages per minibatch; with
    one step of the optimiser per update, which begins where the policy has not moved yet, a clip range and a control of the KL
    divergence.

    :param trial: Trial that samples. Two of its user attributes are used if they are set: ``policy``, the name of the policy,
        and ``n_timesteps``, the length of the training
    :param n_actions: Number of dimensions of the actions if they are a ``Box``, 0 otherwise
    :param n_envs: Number of environments that step together
    :param additional_args: Arguments that the Zoo passes to every sampler; not used
    :return: Keyword arguments of ``PPOExt``
    """
    policy = str(trial.user_attrs.get("policy", "MlpPolicy"))
    _suggest_rollout(trial, n_envs, trial.user_attrs.get("n_timesteps"))
    one_minibatch = _has_one_minibatch(trial.params)
    several_steps = trial.params["n_epochs"] > 1 or not one_minibatch
    _suggest_learning(trial, several_steps, one_minibatch)
    _suggest_learning_rate(trial, several_steps, has_two_networks=policy == "MlpPolicy")
    if n_actions > 0:
        _suggest_action_distribution(trial)
    trial.suggest_categorical("net_type", list(NETWORKS))
    trial.suggest_categorical("net_arch", list(LAYERS))
    trial.suggest_categorical("activation_fn", list(ACTIVATIONS))
    if is_transformer(policy):
        _suggest_transformer(trial)
    if is_recurrent(policy):
        _suggest_recurrence(trial)
    hyperparams = convert_ppo_ext_params(trial.params)
    for name in ("n_steps", "batch_size", "gamma", "gae_lambda"):  # the sampled numbers are not easy to read
        trial.set_user_attr(name, hyperparams[name])
    return hyperparams


def _suggest_rollout(trial: "optuna.Trial", n_envs: int, n_timesteps: int | None) -> None:
    # The converter needs it for the size of a rollout.
    trial.suggest_int("n_envs", n_envs, n_envs)
    shortest, longest = ROLLOUTS
    if n_timesteps is not None:
        longest = min(longest, max(n_timesteps // MIN_UPDATES, 1))
    lowest = max(math.ceil(math.log2(shortest / n_envs)), N_STEPS_POW[0])
    highest = max(min(math.floor(math.log2(longest / n_envs)), N_STEPS_POW[1]), lowest)
    trial.suggest_int("n_steps_pow", lowest, highest)
    trial.suggest_int("n_minibatches_pow", 0, 6)
    trial.suggest_int("n_epochs", 1, 20, log=True)


def _has_one_minibatch(sampled_params: Kwargs) -> bool:
    rollout = _rollout(dict(sampled_params))
    return bool(rollout["batch_size"] == rollout["n_steps"] * sampled_params["n_envs"])


def _suggest_learning(trial: "optuna.Trial", several_steps: bool, one_minibatch: bool) -> None:
    trial.suggest_float("one_minus_gamma", 1e-4, 0.1, log=True)
    trial.suggest_float("one_minus_gae_lambda", 1e-3, 0.3, log=True)
    if several_steps:
        trial.suggest_categorical("clip_range", [0.1, 0.2, 0.3, 0.4])
    trial.suggest_float("ent_coef", 1e-8, 0.1, log=True)
    trial.suggest_float("max_grad_norm", 0.3, 5.0, log=True)
    trial.suggest_categorical("normalize_value", [False, True])
    if one_minibatch:
        # Optuna wants the same choices for a name in all trials.
        trial.suggest_categorical("advantage_norm_of_rollout", ["rollout", "ema"])
    else:
        trial.suggest_categorical("advantage_norm", ["minibatch", "rollout", "ema"])


def _suggest_learning_rate(trial: "optuna.Trial", several_steps: bool, has_two_networks: bool) -> None:
    trial.suggest_float("learning_rate", 1e-5, 5e-3, log=True)
    kl_control = "none"
    if several_steps:
        kl_control = trial.suggest_categorical("kl_control", ["none", "adaptive_lr", "penalty"])
    if kl_control != "none":
        trial.suggest_float("kl", 0.003, 0.05, log=True)
    if kl_control == "adaptive_lr":
        trial.suggest_categorical("adaptive_lr_rule", ["threshold", "proportional"])
    else:
        trial.suggest_categorical("lr_decay", ["constant", "linear"])
    if has_two_networks:
        trial.suggest_categorical("critic_lr_factor", [1.0, 3.0])


def _suggest_action_distribution(trial: "optuna.Trial") -> None:
    action_dist = trial.suggest_categorical("action_dist", ACTION_DISTS)
    if action_dist != "beta":
        trial.suggest_float("log_std_init", -3.0, 0.0)
    if action_dist in ("gaussian", "gsde"):
        trial.suggest_categorical("bounds_coef", BOUNDS_COEFS)
    if action_dist in ("gaussian", "squashed_gaussian"):
        trial.suggest_categorical("noise_color", [0.0, 0.5, 1.0])


def _suggest_transformer(trial: "optuna.Trial") -> None:
    trial.suggest_int("context_length_pow", 2, 6)
    trial.suggest_categorical("d_model", [32, 64, 128])
    trial.suggest_categorical("n_heads", [1, 2, 4])
    trial.suggest_int("n_layers", 1, 2)
    trial.suggest_categorical("gate", [False, True])
    trial.suggest_categorical("n_stacked", [1, 4])
    trial.suggest_categorical("share_features_extractor", [False, True])


def _suggest_recurrence(trial: "optuna.Trial") -> None:
    trial.suggest_categorical("rnn", ["lstm", "gru", "mingru", "lru"])
    trial.suggest_categorical("lstm_hidden_size", [16, 32, 64, 128, 256])
    trial.suggest_categorical("enable_critic_lstm", [False, True])


def convert_ppo_ext_params(sampled_params: Kwargs) -> Kwargs:
    """
    Convert the numbers of a trial to hyperparameters. Of options that exclude each other, those that are off are returned as
    well, because an entry in a YAML file may have switched them on.

    :param sampled_params: Parameters of a trial as Optuna keeps them, sampled by :func:`sample_ppo_ext_params`
    :return: Keyword arguments of ``PPOExt``
    """
    given = dict(sampled_params)
    kind = {"net_type": given.pop("net_type")} if "net_type" in given else {}  # earlier studies did not sample it
    layers = NETWORKS[kind.get("net_type", "mlp")][given.pop("net_arch")]
    policy_kwargs = {
        **kind,
        "net_arch": {"pi": layers, "vf": layers},
        "activation_fn": ACTIVATIONS[given.pop("activation_fn")],
        **_memory(given),
    }
    hyperparams = {
        **_rollout(given),
        "gamma": 1 - given.pop("one_minus_gamma"),
        "gae_lambda": 1 - given.pop("one_minus_gae_lambda"),
        **_learning_rate(given),
    }
    if "advantage_norm_of_rollout" in given:
        hyperparams["advantage_norm"] = given.pop("advantage_norm_of_rollout")
    if "action_dist" in given:
        action_dist = given.pop("action_dist")
        use_sde = action_dist == "gsde"
        hyperparams |= {"action_dist": "gaussian" if use_sde else action_dist, "use_sde": use_sde}
        hyperparams["bounds_coef"] = given.pop("bounds_coef", 0.0)
        hyperparams["noise_color"] = given.pop("noise_color", 0.0)
        policy_kwargs["log_std_init"] = given.pop("log_std_init", 0.0)
    return {**hyperparams, **given, "policy_kwargs": policy_kwargs}


def _rollout(given: Kwargs) -> dict[str, object]:
    n_steps = 2 ** given.pop("n_steps_pow")
    batch_size = size = n_steps * given.pop("n_envs")
    for _ in range(given.pop("n_minibatches_pow")):
        if batch_size % 2 == 0 and batch_size // 2 >= min(SMALLEST_MINIBATCH, size):
            batch_size //= 2
    return {"n_steps": n_steps, "batch_size": batch_size}


def _learning_rate(given: Kwargs) -> Kwargs:
    kl_control, factor = given.pop("kl_control", "none"), given.pop("critic_lr_factor", 1.0)
    kl, penalised = given.pop("kl", None), kl_control == "penalty"
    learning_rate = given["learning_rate"]
    return {
        "adaptive_lr_kl": kl if kl_control == "adaptive_lr" else None,
        "adaptive_lr_rule": given.pop("adaptive_lr_rule", "threshold"),
        "kl_coef": float(penalised),
        "kl_target": kl if penalised else None,
        "lr_decay": given.pop("lr_decay", "constant"),
        "lr_warmup": 0.0,
        "critic_learning_rate": None if factor == 1 else factor * learning_rate,
    }


def _memory(given: Kwargs) -> dict[str, object]:
    of_transformer = ("d_model", "n_heads", "n_layers", "gate", "n_stacked", "share_features_extractor")
    names = (*of_transformer, "rnn", "lstm_hidden_size", "enable_critic_lstm")
    context = {"context_length": 2 ** given.pop("context_length_pow")} if "context_length_pow" in given else {}
    return {**context, **{name: given.pop(name) for name in names if name in given}}


def is_transformer(policy: object) -> bool:
    """
    :param policy: Name or class of a policy
    :return: Whether the policy is a transformer over the last observations
    """
    return getattr(policy, "__name__", str(policy)).endswith("TransformerPolicy")


def is_recurrent(policy: object) -> bool:
    """
    :param policy: Name or class of a policy
    :return: Whether the policy has a recurrent network
    """
    return getattr(policy, "__name__", str(policy)).endswith("LstmPolicy")
