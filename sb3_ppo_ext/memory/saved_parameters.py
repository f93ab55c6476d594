"""What the saved parameters of a transformer policy tell about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch as th
from torch import nn

from sb3_ppo_ext.common.type_aliases import StateDict
from sb3_ppo_ext.common.validation import refuse
from sb3_ppo_ext.memory.policies import TransformerPolicyMixin

# Parameters of a block of a transformer that were added later
ADDED = ("sink_scores", "factors.weight")


def added_parameters(names: Iterable[str], state: StateDict) -> set[str]:
    """
    :param names: Names of the parameters of a policy
    :param state: Saved parameters, by name
    :return: Names of those of a transformer that the saved parameters lack, since they are older
    """
    missing = {(name, ending) for name in names for ending in ADDED if name.endswith(ending) and name not in state}
    # Without the scores beside them, these are parameters of another part of the policy.
    return {name for name, ending in missing if name.removesuffix(ending) + "distance_scores" in state}


def shares_transformer(state: Mapping[str, th.Tensor]) -> bool:
    """
    :param state: Parameters of a policy as they were saved, by name
    :return: Whether actor and critic share a transformer
    """
    # The two names of a shared parameter are saved with one storage. Equal numbers can also be those of two transformers.
    pairs = _of_actor_and_critic(state)
    return bool(pairs) and all(one.data_ptr() == other.data_ptr() for one, other in pairs)


def check_sharing(policy: nn.Module, state: Mapping[str, th.Tensor], has_optimizer: bool) -> None:
    """
    :param policy: Policy that is to get the parameters
    :param state: Parameters of a policy, by name
    :param has_optimizer: Whether it is to get the state of their optimiser as well
    :raises ValueError: if it has a shared transformer, and these are the parameters of separate ones, of which only those of
        the critic would be kept; or if it has separate ones, and the state of the optimiser is that of a shared one
    """
    if not isinstance(policy, TransformerPolicyMixin):
        return
    shared = policy.share_features_extractor
    differ = any(one.shape == other.shape and not th.equal(one, other) for one, other in _of_actor_and_critic(state))
    if (shared and differ) or (not shared and has_optimizer and shares_transformer(state)):
        remedy = (
            f"create the model with `policy_kwargs=dict(share_features_extractor={not shared})`, as that of these parameters"
        )
        refuse("share_features_extractor", shared, remedy)


def _of_actor_and_critic(state: Mapping[str, th.Tensor]) -> list[tuple[th.Tensor, th.Tensor]]:
    """The parameters of the transformers of actor and critic, in pairs."""
    names = {name: name.replace("pi", "vf", 1) for name in state if name.startswith("pi_transformer.")}
    return [(state[one], state[other]) for one, other in names.items() if other in state]
