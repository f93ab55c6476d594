"""One optimiser for the policy, whose groups of parameters may learn at different rates and by different rules."""

import math
import warnings
from collections.abc import Callable, Set
from typing import Any, Literal, TypeAlias

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

from sb3_ppo_ext.common.validation import BadArgumentError, check_kwargs, refuse

# Torch has it since 2.9.
Muon: type[th.optim.Optimizer] | None = getattr(th.optim, "Muon", None)
# Beside "adam", which stands for the policy's own class, and "muon"
OPTIMIZERS: dict[str, type[th.optim.Optimizer]] = {"adamw": th.optim.AdamW, "sgd": th.optim.SGD}
OptimizerName: TypeAlias = Literal["adam", "adamw", "sgd", "muon"]
# SB3's, which its policy puts into the arguments of its default optimiser
ADAM_EPS = 1e-5


class MuonWithAdamW(th.optim.Optimizer):
    """
    Muon for hidden matrices, AdamW for everything else, as one optimiser.

    Each group says by its key ``algorithm`` who takes it. Muon's step is scaled to the size of AdamW's
    (``match_rms_adamw``), so that one learning rate serves both.

    Papers: https://arxiv.org/abs/2502.16982, https://kellerjordan.github.io/posts/muon/

    :param groups: Groups of named parameters, with ``algorithm`` ``"Muon"`` or ``"AdamW"``
    :param lr: Learning rate
    :param weight_decay: Decoupled, unless a group has its own
    :param momentum: Muon's
    :param betas: AdamW's
    :param eps: AdamW's
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
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
            # Their own checks and defaults; copies, for they write into the groups
            own = [dict(group) for group in groups if group["algorithm"] == name]
            if own:
                self._optimizers[name] = optimizer_class(own, lr=lr, **{"weight_decay": weight_decay, **options[name]})
        super().__init__([group for part in self._optimizers.values() for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the parts work on this optimiser's groups and state, which are what is saved."""
        for name, optimizer in self._optimizers.items():
            optimizer.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            optimizer.state = self.state

    def step(self, closure: Any = None) -> Any:
        """
        :param closure: Evaluates the loss again, as for any optimiser of torch
        :return: The loss, if there is a closure
        """
        loss = None
        if closure is not None:
            with th.enable_grad():
                loss = closure()
        for optimizer in self._optimizers.values():
            optimizer.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_optimizers": self._optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # `load_state_dict` comes here as well, with new groups and a new state.
        super().__setstate__(state)
        self._share()


def make_optimizer(
    policy: ActorCriticPolicy,
    name: str,
    weight_decay: float,
    own_critic: bool,
    optimizer_kwargs: dict[str, Any] | None = None,
) -> th.optim.Optimizer:
    """
    The learning rates are 0 until the algorithm sets them. Groups have the keys ``role`` (``"actor"``, ``"critic"``, or
    ``"all"``) and ``algorithm`` (the class that makes their steps).

    :param policy: Whose parameters it shall optimise
    :param name: ``"adam"`` (or another class, if that is the policy's), ``"adamw"``, ``"sgd"`` or ``"muon"``
    :param weight_decay: Decoupled for AdamW and Muon, added to the gradient by the others; not of ``log_std``, which it
        would pull towards 0, that is the standard deviation towards 1
    :param own_critic: Whether the critic's parameters have groups of their own
    :param optimizer_kwargs: The user's further arguments; of the policy's own class, what the policy has made of them
    :return: The optimiser
    :raises ValueError: if an argument is not valid, or torch has no Muon
    """
    if name == "muon" and Muon is None:
        refuse("optimizer", name, "it needs torch 2.9 or newer; upgrade torch, or give another one")
    factory: Any = {"adam": policy.optimizer_class, "muon": MuonWithAdamW, **OPTIMIZERS}[name]
    kwargs = _arguments(policy, name, weight_decay, optimizer_kwargs)
    check_kwargs("optimizer_kwargs", kwargs, factory, ("params", "groups", "lr"))
    if factory is MuonWithAdamW:
        groups = parameter_groups(policy, own_critic, "AdamW", _checked_hidden_matrices(policy))
    else:
        groups = parameter_groups(policy, own_critic, factory.__name__)
    optimizer: th.optim.Optimizer = factory(groups, lr=0.0, **kwargs)
    return optimizer


def _arguments(
    policy: ActorCriticPolicy, name: str, weight_decay: float, optimizer_kwargs: dict[str, Any] | None
) -> dict[str, Any]:
    given = optimizer_kwargs or {}
    if weight_decay > 0 and "weight_decay" in given:
        refuse("weight_decay", weight_decay, "`optimizer_kwargs` has one too; give only one of them")
    if name == "adam":
        arguments = dict(policy.optimizer_kwargs)
    else:
        # What SB3 gives to its default, if the user gives nothing; torch's AdamW has a decay of its own.
        arguments = {"eps": ADAM_EPS} if optimizer_kwargs is None and name != "sgd" else {}
        arguments |= {"weight_decay": 0.0, **given}
    return {**arguments, "weight_decay": weight_decay} if weight_decay > 0 else arguments


def _checked_hidden_matrices(policy: ActorCriticPolicy) -> set[th.Tensor]:
    matrices = hidden_matrices(policy)
    if not matrices:
        remedy = "give `net_arch` at least two layers, such as [64, 64]"
        warnings.warn(f'`optimizer="muon"`: the policy has no hidden matrix, AdamW takes all of it; {remedy}.', stacklevel=2)
    return matrices


def parameter_groups(
    policy: ActorCriticPolicy, own_critic: bool, algorithm: str, of_muon: Set[th.Tensor] = frozenset()
) -> list[dict[str, Any]]:
    """
    :param policy: Whose parameters
    :param own_critic: Whether the critic's parameters have groups of their own
    :param algorithm: Class that makes the steps
    :param of_muon: Those whose steps are made by Muon instead
    :return: Groups of named parameters, for an optimiser of torch
    """
    of_critic = critic_parameters(policy) if own_critic else frozenset()
    groups: dict[tuple[str, str, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in policy.named_parameters():
        role = "all" if not own_critic else "critic" if parameter in of_critic else "actor"
        key = (role, "Muon" if parameter in of_muon else algorithm, name == "log_std")
        groups.setdefault(key, []).append((name, parameter))
    return [
        {"params": parameters, "role": role, "algorithm": made_by, **({"weight_decay": 0.0} if is_log_std else {})}
        for (role, made_by, is_log_std), parameters in groups.items()
    ]


def critic_parameters(policy: ActorCriticPolicy) -> set[th.Tensor]:
    """
    :param policy: An actor-critic policy of SB3
    :return: What is the critic's alone; what it shares belongs to the actor
    """
    of_critic = ("value_net", "mlp_extractor.value_net", "vf_features_extractor", "vf_transformer")
    of_actor = ("action_net", "mlp_extractor.policy_net", "pi_features_extractor", "pi_transformer")
    return _parameters(policy, *of_critic) - _parameters(policy, *of_actor)


def _parameters(policy: nn.Module, *names: str) -> set[th.Tensor]:
    return {parameter for name in names for parameter in _find(policy, name).parameters()}


def hidden_matrices(policy: ActorCriticPolicy) -> set[th.Tensor]:
    """
    :param policy: An actor-critic policy of SB3
    :return: Weights of its hidden linear layers: neither of those that read the observation, nor of the heads
    """
    readers = ("pi_features_extractor", "vf_features_extractor", "pi_transformer", "vf_transformer")
    extractors = [_layers(policy, name) for name in readers]
    networks = [_layers(policy, f"mlp_extractor.{name}") for name in ("policy_net", "value_net")]
    if not any(extractors):
        # Then it is the networks that read the observation.
        networks = [layers[1:] for layers in networks]
    hidden = [layer for layers in [*(layers[1:] for layers in extractors), *networks] for layer in layers]
    return {layer.weight for layer in hidden if isinstance(layer, nn.Linear)}


def _layers(policy: nn.Module, name: str) -> list[nn.Module]:
    """What multiplies by a matrix in a part of the policy, or is a convolution, in order."""
    return [layer for layer in _find(policy, name).modules() if getattr(getattr(layer, "weight", None), "ndim", 0) >= 2]


def _find(policy: nn.Module, name: str) -> nn.Module:
    try:
        return policy.get_submodule(name)
    except AttributeError:  # a policy of another make
        return nn.Module()


def clip_gradients(policy: ActorCriticPolicy, max_norm: float) -> dict[str, th.Tensor]:
    """
    Clip the norm of the gradients, all together or actor's and critic's apart. Muon's stay as they are, for their size does
    not change its step.

    :param policy: Whose optimiser knows the groups
    :param max_norm: The largest norm
    :return: Norms before the clipping: ``grad_norm``, of all or of the actor's, ``critic_grad_norm``, ``muon_grad_norm``
    """
    groups = policy.optimizer.param_groups
    if not all("role" in group for group in groups):
        return {"grad_norm": nn.utils.clip_grad_norm_(policy.parameters(), max_norm)}
    together: dict[str, list[nn.Parameter]] = {}
    for group in groups:
        kind = "muon_" if group["algorithm"] == "Muon" else "critic_" if group["role"] == "critic" else ""
        with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
        if with_gradient:  # an actor at rest has none
            together.setdefault(f"{kind}grad_norm", []).extend(with_gradient)
    return {
        name: nn.utils.clip_grad_norm_(parameters, math.inf if name == "muon_grad_norm" else max_norm)
        for name, parameters in together.items()
    }


def adopt_state(policy: ActorCriticPolicy, saved: dict[str, Any]) -> dict[str, Any]:
    """
    Bring the saved state of an optimiser into the form of the policy's: parameter by parameter, under the policy's own
    grouping and hyperparameters.

    :param policy: Whose optimiser shall take it
    :param saved: State-dictionary of an optimiser of the same policy
    :return: What its ``load_state_dict`` takes
    :raises ValueError: if the saved state is that of another kind of optimiser
    """
    own = policy.optimizer.state_dict()
    if not any("role" in group for group in [*own["param_groups"], *saved["param_groups"]]):
        return saved  # both are SB3's
    order = [name for name, _ in policy.named_parameters()]
    # SB3's optimiser holds the parameters in the policy's order, and is of the policy's class.
    default_class = policy.optimizer_class.__name__
    before, now = (_algorithms(state, order, default_class) for state in (saved, own))
    if before.keys() != now.keys():
        return saved  # another network, which is for SB3 to refuse
    if before != now:
        kinds = [" and ".join(sorted(set(kind.values()))) for kind in (before, now)]
        raise BadArgumentError(
            f"The saved state is that of the optimizer {kinds[0]}, while `optimizer` is {kinds[1]} here: give the `optimizer` "
            "that it was saved with. To go on from the saved policy with another optimizer, make a new model and give it "
            '`set_parameters({"policy": saved_model.policy.state_dict()}, exact_match=False)`.'
        )
    places = dict(zip(now, range(len(now)), strict=True))
    state = {places[name]: saved["state"][i] for i, name in enumerate(before) if i in saved["state"]}
    return {"state": state, "param_groups": own["param_groups"]}


def _algorithms(state: dict[str, Any], order: list[str], default_class: str) -> dict[str, str]:
    """Who optimises each parameter, by name, in the order of the state's numbering."""
    return {
        name: group.get("algorithm", default_class)
        for group in state["param_groups"]
        for name in group.get("param_names", order)
    }
