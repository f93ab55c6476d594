"""The optimiser of the policy, with parameter groups that may have different learning rates and algorithms."""

import math
import warnings
from collections.abc import Callable, Set
from copy import deepcopy
from typing import Any, Literal, TypeAlias

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

from sb3_ppo_ext.common.type_aliases import Kwargs, StateDict
from sb3_ppo_ext.common.validation import BadArgumentError, check_kwargs, check_number, refuse

# `None` before torch 2.9
Muon: type[th.optim.Optimizer] | None = getattr(th.optim, "Muon", None)
# In addition to "adam", which is the optimiser class of the policy, and "muon"
OPTIMIZERS: dict[str, type[th.optim.Optimizer]] = {"adamw": th.optim.AdamW, "sgd": th.optim.SGD}
OptimizerName: TypeAlias = Literal["adam", "adamw", "sgd", "muon"]
# Epsilon that SB3's policies set for their default optimiser
ADAM_EPS = 1e-5


class MuonWithAdamW(th.optim.Optimizer):
    """
    Muon for hidden weight matrices and AdamW for all other parameters, combined in one optimiser.

    The key ``algorithm`` of each parameter group selects the algorithm. The steps of Muon are scaled to the size of AdamW's
    (``match_rms_adamw``), so that both can use the same learning rate.

    Papers: https://arxiv.org/abs/2502.16982, https://kellerjordan.github.io/posts/muon/

    :param groups: Groups of named parameters, with ``algorithm`` ``"Muon"`` or ``"AdamW"``
    :param lr: Learning rate
    :param weight_decay: Decoupled weight decay of the groups that do not set their own
    :param momentum: Momentum of Muon
    :param betas: Decay rates of AdamW's moment estimates
    :param eps: Epsilon of AdamW
    """

    def __init__(
        self,
        groups: list[StateDict],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        assert Muon is not None, "`make_optimizer` has checked it"
        classes: dict[str, Callable[..., th.optim.Optimizer]] = {"Muon": Muon, "AdamW": th.optim.AdamW}
        options = {
            "Muon": {"momentum": momentum, "adjust_lr_fn": "match_rms_adamw"},
            "AdamW": {"betas": betas, "eps": eps},
        }
        self._optimizers: dict[str, th.optim.Optimizer] = {}
        for name, optimizer_class in classes.items():
            # Each class checks its arguments and fills in its defaults. Groups are copied, since it modifies them.
            own = [dict(group) for group in groups if group["algorithm"] == name]
            if own:
                self._optimizers[name] = optimizer_class(own, lr=lr, **{"weight_decay": weight_decay, **options[name]})
        super().__init__([group for part in self._optimizers.values() for group in part.param_groups], {})
        self._share()

    @property
    def parts(self) -> dict[str, th.optim.Optimizer]:
        """Optimisers by the name of their algorithm, on the groups and the state of this one."""
        return self._optimizers

    def _share(self) -> None:
        """Let both optimisers work on the groups and the state of this one, which are those that are saved."""
        for name, optimizer in self._optimizers.items():
            optimizer.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            optimizer.state = self.state

    def step(self, closure: Any = None) -> Any:
        """
        :param closure: Function that reevaluates the model and returns the loss, as for any optimiser of torch
        :return: Loss, ``None`` without a closure
        """
        loss = None
        if closure is not None:
            with th.enable_grad():
                loss = closure()
        for optimizer in self._optimizers.values():
            optimizer.step()
        return loss

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_optimizers": self._optimizers}

    def __setstate__(self, state: dict[str, object]) -> None:
        # `load_state_dict` also calls this method, with new groups and a new state.
        super().__setstate__(state)
        self._share()


def make_optimizer(
    policy: ActorCriticPolicy,
    name: str,
    weight_decay: float,
    own_critic: bool,
    optimizer_kwargs: Kwargs | None = None,
) -> th.optim.Optimizer:
    """
    Create the optimiser of a policy. Learning rates are 0 until the algorithm sets them. Groups have the keys ``role``
    (``"actor"``, ``"critic"``, or ``"all"``) and ``algorithm`` (name of the optimiser class).

    :param policy: Policy with the parameters to optimise
    :param name: ``"adam"`` (the optimiser class of the policy, Adam by default), ``"adamw"``, ``"sgd"`` or ``"muon"``
    :param weight_decay: Weight decay, decoupled for AdamW and Muon, an L2 penalty for the others. Logarithms are excluded,
        such as ``log_std``, since decay would pull the standard deviation towards 1
    :param own_critic: Whether the parameters of the critic have groups of their own
    :param optimizer_kwargs: Additional arguments given by the user; for ``"adam"``, those of the policy are used
    :return: Optimiser of the policy
    :raises ValueError: if an argument is not valid, or torch has no Muon
    """
    if name == "muon" and Muon is None:
        refuse("optimizer", name, "it needs torch 2.9 or newer; upgrade torch, or give another one")
    factory = {"adam": policy.optimizer_class, "muon": MuonWithAdamW, **OPTIMIZERS}[name]
    kwargs = _arguments(policy, name, weight_decay, optimizer_kwargs)
    check_kwargs("optimizer_kwargs", kwargs, factory, ("params", "groups", "lr"))
    if factory is MuonWithAdamW:
        groups = parameter_groups(policy, own_critic, "AdamW", _checked_hidden_matrices(policy))
    else:
        groups = parameter_groups(policy, own_critic, factory.__name__)
    optimizer: th.optim.Optimizer = factory(groups, lr=0.0, **kwargs)
    return optimizer


def _arguments(
    policy: ActorCriticPolicy, name: str, weight_decay: float, optimizer_kwargs: dict[str, object] | None
) -> dict[str, object]:
    given = optimizer_kwargs or {}
    if weight_decay > 0 and "weight_decay" in given:
        refuse("weight_decay", weight_decay, "`optimizer_kwargs` has one too; give only one of them")
    if name == "adam":
        arguments = dict(policy.optimizer_kwargs)
    else:
        # SB3's epsilon, unless the user gives arguments. The default weight decay of torch's AdamW is not 0.
        arguments = {"eps": ADAM_EPS} if optimizer_kwargs is None and name != "sgd" else {}
        arguments |= {"weight_decay": 0.0, **given}
    return {**arguments, "weight_decay": weight_decay} if weight_decay > 0 else arguments


def _checked_hidden_matrices(policy: ActorCriticPolicy) -> set[th.Tensor]:
    matrices = hidden_matrices(policy)
    if not matrices:
        remedy = "give `net_arch` at least two layers, such as [64, 64]"
        warnings.warn(
            f'`optimizer="muon"`: the policy has no hidden matrix, so AdamW optimises all of it; {remedy}.', stacklevel=2
        )
    return matrices


def parameter_groups(
    policy: ActorCriticPolicy, own_critic: bool, algorithm: str, of_muon: Set[th.Tensor] = frozenset()
) -> list[dict[str, object]]:
    """
    :param policy: Policy with the parameters to group
    :param own_critic: Whether the parameters of the critic have groups of their own
    :param algorithm: Name of the optimiser class
    :param of_muon: Parameters that Muon optimises instead
    :return: Groups of named parameters, for an optimiser of torch
    """
    of_critic = critic_parameters(policy) if own_critic else frozenset()
    groups: dict[tuple[str, str, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in policy.named_parameters():
        role = "all" if not own_critic else "critic" if parameter in of_critic else "actor"
        is_logarithm = name.rpartition(".")[2].startswith("log_")
        key = (role, "Muon" if parameter in of_muon else algorithm, is_logarithm)
        groups.setdefault(key, []).append((name, parameter))
    return [
        {"params": parameters, "role": role, "algorithm": made_by, **({"weight_decay": 0.0} if is_logarithm else {})}
        for (role, made_by, is_logarithm), parameters in groups.items()
    ]


def critic_parameters(policy: ActorCriticPolicy) -> set[th.Tensor]:
    """
    :param policy: Actor-critic policy
    :return: Parameters that only the critic uses; those that it shares belong to the actor
    """
    of_critic = ("value_net", "mlp_extractor.value_net", "vf_features_extractor", "vf_transformer", "lstm_critic", "critic")
    of_actor = ("action_net", "mlp_extractor.policy_net", "pi_features_extractor", "pi_transformer", "lstm_actor")
    return _parameters(policy, *of_critic) - _parameters(policy, *of_actor)


def knows_critic(networks: nn.Module | None) -> bool:
    """
    :param networks: Networks between the features and the output layers, ``policy.mlp_extractor``
    :return: Whether :func:`critic_parameters` can tell the critic's layers, by the names that SB3 gives the two networks
    """
    is_named = hasattr(networks, "policy_net") and hasattr(networks, "value_net")
    return networks is None or is_named or not any(True for _ in networks.parameters())


def _parameters(policy: nn.Module, *names: str) -> set[th.Tensor]:
    return {parameter for name in names for parameter in _find(policy, name).parameters()}


def hidden_matrices(policy: ActorCriticPolicy) -> set[th.Tensor]:
    """
    :param policy: Actor-critic policy
    :return: Weights of the hidden linear layers, without the first layers, which read the observation, and the output layers
    """
    hidden: list[nn.Module] = []
    for role, network in (("pi", "policy_net"), ("vf", "value_net")):
        extractors = [_layers(policy, f"{role}_{name}") for name in ("features_extractor", "transformer")]
        layers = _layers(policy, f"mlp_extractor.{network}")
        # Without layers in front of it, a network reads the observation.
        is_behind = any(extractors) or _parameters(policy, "lstm_actor")
        hidden += [*(layer for part in extractors for layer in part[1:]), *(layers if is_behind else layers[1:])]
    # Single steps have a layer of their own, beside the first one.
    readers = _parameters(policy, "pi_transformer.single", "vf_transformer.single")
    return {layer.weight for layer in hidden if isinstance(layer, nn.Linear)} - readers


def _layers(policy: nn.Module, name: str) -> list[nn.Module]:
    """Linear and convolutional layers of a part of the policy, in order."""
    return [layer for layer in _find(policy, name).modules() if getattr(getattr(layer, "weight", None), "ndim", 0) >= 2]


def _find(policy: nn.Module, name: str) -> nn.Module:
    try:
        return policy.get_submodule(name)
    except AttributeError:  # a policy with other submodules
        return nn.Module()


def clip_gradients(policy: ActorCriticPolicy, max_norm: float) -> dict[str, th.Tensor]:
    """
    Clip the norm of the gradients, of actor and critic separately if they have groups of their own. Gradients of Muon are not
    clipped, since its steps do not depend on their scale.

    :param policy: Policy with gradients, and with an optimiser that defines the groups
    :param max_norm: Maximum norm
    :return: Norms before clipping, by name: ``grad_norm`` (of all parameters, or of the actor), ``critic_grad_norm`` and
        ``muon_grad_norm``
    """
    groups = policy.optimizer.param_groups
    if not all("role" in group for group in groups):
        return {"grad_norm": nn.utils.clip_grad_norm_(policy.parameters(), max_norm)}
    together: dict[str, list[nn.Parameter]] = {}
    for group in groups:
        with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
        if with_gradient:  # a frozen actor has none
            together.setdefault(kind_of_norm(group), []).extend(with_gradient)
    return {
        name: nn.utils.clip_grad_norm_(parameters, math.inf if name == "muon_grad_norm" else max_norm)
        for name, parameters in together.items()
    }


def kind_of_norm(group: StateDict) -> str:
    """
    :param group: Parameter group of an optimiser made by :func:`make_optimizer`
    :return: Name of the norm to which its gradients belong
    """
    kind = "muon_" if group["algorithm"] == "Muon" else "critic_" if group["role"] == "critic" else ""
    return f"{kind}grad_norm"


def adopt_state(policy: ActorCriticPolicy, saved: StateDict, new: Set[str] = frozenset()) -> StateDict:
    """
    Convert the saved state of an optimiser to the parameter groups of the policy's optimiser, which keeps its own
    hyperparameters.

    :param policy: Policy with the optimiser that will load the state
    :param saved: State dictionary of an optimiser of the same policy
    :param new: Names of parameters that the policy did not have when it was saved: the optimiser begins with these anew
    :return: State dictionary for ``load_state_dict`` of the policy's optimiser
    :raises ValueError: if the saved state is that of another kind of optimiser
    """
    own = policy.optimizer.state_dict()
    if not new and not any("role" in group for group in [*own["param_groups"], *saved["param_groups"]]):
        return saved  # both have the form of SB3's optimiser
    order = [name for name, _ in policy.named_parameters()]
    # SB3's optimiser has the parameters in the order of the policy, and is of the policy's `optimizer_class`.
    default_class = policy.optimizer_class.__name__
    before = _algorithms(saved, [name for name in order if name not in new], default_class)
    now = _algorithms(own, order, default_class)
    if before.keys() != now.keys() - new:
        return saved  # another network, for which SB3 raises an error
    if any(before[name] != now[name] for name in before):
        kinds = [" and ".join(sorted(set(kind.values()))) for kind in (before, now)]
        raise BadArgumentError(
            f"The saved state is that of the optimizer {kinds[0]}, while `optimizer` is {kinds[1]} here: give the `optimizer` "
            "that it was saved with. To continue from the saved policy with another optimizer, make a new model and give it "
            '`set_parameters({"policy": saved_model.policy.state_dict()}, exact_match=False)`.'
        )
    positions = dict(zip(now, range(len(now)), strict=True))
    state = {positions[name]: saved["state"][i] for i, name in enumerate(before) if i in saved["state"]}
    return {"state": state, "param_groups": own["param_groups"]}


def check_state_is_whole(state: StateDict) -> None:
    """
    Refuse tensors that repeat their numbers: a small file can have one of any size, which PyTorch would allocate.

    :param state: State dictionary of an optimiser
    :raises ValueError: if it has such a tensor; a state of another form can also raise other errors
    """
    for values in state["state"].values():
        for name, value in values.items():
            if isinstance(value, th.Tensor) and value.nbytes > value.untyped_storage().nbytes():
                refuse(name, value.shape, "the saved state of the optimizer has fewer numbers")


def keep_counts_on_host(optimizer: th.optim.Optimizer) -> None:
    """
    Move counts of steps to the host, where an optimiser reads them in each step without waiting. PyTorch leaves them on a GPU
    if a state was loaded there.

    :param optimizer: Optimiser that has loaded a state
    """
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            continue  # It reads them on the device.
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), th.Tensor):
                state["step"] = state["step"].cpu()


def check_step(optimizer: th.optim.Optimizer) -> None:
    """
    Check that an optimiser can continue from its state, by a step without gradient on a copy.

    :param optimizer: Optimiser, which is not changed
    :raises Exception: of any type, if the state is not one of such an optimiser
    """
    trial = deepcopy(optimizer)
    for group in trial.param_groups:
        for name, value in group.items():
            if isinstance(value, float):
                check_number(name, value)
        for parameter in group["params"]:
            parameter.grad = th.zeros_like(parameter)
    trial.step()


def _algorithms(state: StateDict, order: list[str], default_class: str) -> dict[str, str]:
    """Name of the algorithm of each parameter, by parameter name, in the order in which the state numbers the parameters."""
    return {
        name: group.get("algorithm", default_class)
        for group in state["param_groups"]
        for name in group.get("param_names", order)
    }
