"""What all action distributions share: the parents of their PyTorch and of their NumPy implementations."""

import math
from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
import torch as th
from stable_baselines3.common.distributions import Distribution
from torch import nn

# The action that stands for a distribution where none is to be sampled
DeterministicAction = Literal["mean", "mode"]
LOG_2, LOG_2_PI = math.log(2), math.log(2 * math.pi)
# How near to a bound an action may be, as a share of the width: at the bound itself, logarithms would be infinite.
EDGE = 1e-6
# What "near the bounds" means in the statistics, as a share of the width
NEAR = 0.01
# How many distributions the statistics are computed from, at most
MAX_STATISTICS = 2048


class BoundedDistribution(Distribution):
    """
    An action distribution that respects the bounds of a ``Box``.

    It is one of SB3's ``Distribution``, for any code that works with these. What it samples and evaluates is a *latent*, shape
    ``(batch_size, action_dim)``, which does not depend on the parameters of the policy: :meth:`position` turns it into where
    the action lies between its bounds. Densities and entropies are those of the action in units of the bounds (-1 at ``low``,
    1 at ``high``), in nats, whatever the bounds are.

    :param action_dim: Dimension of the action space
    :param deterministic_action: Which action ``get_actions(deterministic=True)`` returns, for distributions that know several
    """

    def __init__(self, action_dim: int, deterministic_action: DeterministicAction = "mean"):
        super().__init__()
        self.action_dim = action_dim
        self.deterministic_action = deterministic_action

    @staticmethod
    @abstractmethod
    def position(latents: np.ndarray) -> np.ndarray:
        """
        :param latents: Samples, any shape
        :return: Where the actions lie between their bounds, from 0 (``low``) to 1 (``high``), the same shape
        """

    @staticmethod
    @abstractmethod
    def latents(position: np.ndarray) -> np.ndarray:
        """
        The inverse of :meth:`position`, except for actions closer than a millionth to a bound: these get the latent of the
        nearest action that is not.

        :param position: Where actions lie between their bounds, from 0 to 1, any shape
        :return: The latents that stand for these actions in ``log_prob``, the same shape
        """

    @abstractmethod
    def parameters(self) -> th.Tensor:
        """
        :return: The numbers that define the distribution, shape ``(batch_size, 2 * action_dim)``
        """

    @staticmethod
    @abstractmethod
    def statistics(parameters: th.Tensor) -> dict[str, float]:
        """
        :param parameters: The :meth:`parameters` of the distributions for many observations, shape ``(n, 2 * action_dim)``
        :return: Statistics that are worth logging, by name. One of them is ``mass_near_bounds``, the share of the probability
            within 1 % of a bound
        """

    def actions_from_params(self, *args: Any, deterministic: bool = False) -> th.Tensor:
        return self.proba_distribution(*args).get_actions(deterministic)

    def log_prob_from_params(self, *args: Any) -> tuple[th.Tensor, th.Tensor]:
        latents = self.actions_from_params(*args)
        return latents, self.log_prob(latents)


class NumpyDistribution(ABC):
    """
    The NumPy side of an action distribution, for the native engine: samples, log probabilities and their gradients from what
    the output layer of a policy returns, where PyTorch would spend most of its time on calls.

    :param distribution: The policy's distribution (``policy.action_dist``)
    :param log_std: The policy's parameter of this name, ``None`` if it has none
    """

    # Whether the outputs are followed, in the same rows, by the latents that the output layer computes them from
    needs_latents = False

    def __init__(self, distribution: Distribution, log_std: nn.Parameter | None):
        self.distribution = distribution
        self.log_std = log_std
        # The values of `log_std` (in the same memory) and its gradient, if there is one
        self.parameter: Any = None if log_std is None else log_std.detach().numpy()
        self.d_log_std: Any = None if log_std is None else np.zeros_like(self.parameter)

    @classmethod
    def why_not(cls, distribution: Any) -> str | None:
        """
        :param distribution: A distribution of this family
        :return: Why there is no NumPy side for it, ``None`` if there is one
        """
        return None

    def pack(self) -> None:  # noqa: B027  # there may be nothing to do
        """Take over the values of ``log_std`` after they have changed."""

    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> Any:
        """
        :param n_steps: Number of steps of the rollout
        :param n_envs: Number of environments
        :param n_outputs: Number of outputs of the output layer
        :return: The random numbers of each step, a sequence of length ``n_steps`` whose elements, or all of them together,
            :meth:`scaled` takes. They do not depend on the parameters, which may change after they were drawn
        """
        return [None] * n_steps

    def scaled(self, noise: Any) -> Any:
        """
        :param noise: Random numbers from :meth:`noise`
        :return: What :meth:`sample` takes, with the parameters as they are now
        """
        return noise

    @abstractmethod
    def sample(self, outputs: np.ndarray, noise: Any) -> np.ndarray:
        """
        :param outputs: Outputs of the output layer, shape ``(n_envs, n_outputs)``
        :param noise: The random numbers of this step, from :meth:`noise`, as :meth:`scaled` returns them
        :return: Actions as the rollout buffer stores them, shape ``(n_envs, action_dim)``, or ``(n_envs,)`` if they are
            discrete
        """

    @abstractmethod
    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """
        :param outputs: Outputs of the output layer, shape ``(batch_size, n_outputs)``
        :param actions: Actions as the rollout buffer stores them, shape ``(batch_size, action_dim)``
        :return: Log probabilities of the actions, shape ``(batch_size,)``
        """

    def described(self, outputs: np.ndarray) -> np.ndarray:
        """
        :param outputs: The outputs that :meth:`log_prob` was called with last, shape ``(batch_size, n_outputs)``
        :return: What :meth:`entropies` and :meth:`parameters` need to know of the distributions after the policy has changed,
            shape ``(batch_size, n)``
        """
        if self.log_std is None:
            return outputs
        described = np.empty((len(outputs), 2 * outputs.shape[1]), outputs.dtype)
        described[:, : outputs.shape[1]] = outputs
        described[:, outputs.shape[1] :] = self.parameter
        return described

    def entropies(self, described: np.ndarray) -> np.ndarray:
        """
        :param described: Rows that :meth:`described` has returned, shape ``(batch_size, n)``
        :return: Entropies in nats, shape ``(batch_size,)``
        """
        with th.no_grad():
            entropies: Any = self._restored(described).entropy()
            return entropies.numpy()

    def parameters(self, described: np.ndarray) -> th.Tensor | None:
        """
        :param described: Rows that :meth:`described` has returned, shape ``(batch_size, n)``
        :return: The parameters of bounded distributions (see :meth:`BoundedDistribution.parameters`), ``None`` for others
        """
        if not isinstance(self.distribution, BoundedDistribution):
            return None
        with th.no_grad():
            return self._restored(described).parameters()

    def _restored(self, described: np.ndarray) -> Any:
        rows = th.from_numpy(described)
        return self.make(rows) if self.log_std is None else self.make(*rows.chunk(2, dim=1))

    def make(self, outputs: th.Tensor, log_std: th.Tensor | None = None) -> Distribution:
        """
        :param outputs: Outputs of the output layer, shape ``(batch_size, n_outputs)``
        :param log_std: Logarithms of the standard deviations; by default the values of the policy's parameter
        :return: The distribution in PyTorch, differentiable in both
        """
        own = () if self.log_std is None else (self.log_std if log_std is None else log_std,)
        return self.distribution.proba_distribution(outputs, *own)

    def gradient(self, d_log_prob: np.ndarray, ent_coef: float, accumulate: bool = False) -> np.ndarray:
        """
        The gradient of a loss that depends on the log probabilities which :meth:`log_prob` returned last, plus ``ent_coef``
        times the entropy loss (minus the mean entropy). The gradient with respect to ``log_std`` is written to ``d_log_std``.

        :param d_log_prob: Derivatives of the loss with respect to the log probabilities, shape ``(batch_size,)``
        :param ent_coef: Entropy coefficient
        :param accumulate: Whether the gradient with respect to ``log_std`` is added to ``d_log_std`` instead of replacing it
        :return: The gradient with respect to the outputs, shape ``(batch_size, n_outputs)``
        """
        d_outputs, d_log_std = self._gradients(d_log_prob, ent_coef)
        if d_log_std is not None:
            if accumulate:
                self.d_log_std += d_log_std
            else:
                self.d_log_std[:] = d_log_std
        return d_outputs

    @abstractmethod
    def _gradients(self, d_log_prob: np.ndarray, ent_coef: float) -> tuple[np.ndarray, np.ndarray | None]:
        """:return: The gradients with respect to the outputs and to ``log_std``, ``None`` if that is not learned"""


def clamp(values: th.Tensor, low: float, high: float) -> th.Tensor:
    """
    ``values.clamp(low, high)`` for values that are optimised: outside the range the gradient still leads back into it, where
    that of the usual clamp is 0 for good; it does not lead further out.

    :param values: Values, any shape
    :param low: Lower bound
    :param high: Upper bound
    :return: The values within the bounds, the same shape
    """
    return _Clamp.apply(values, low, high)


class _Clamp(th.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: th.Tensor, low: float, high: float) -> th.Tensor:
        ctx.save_for_backward(values)
        ctx.bounds = low, high
        return values.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: th.Tensor) -> Any:
        (values,), (low, high), (gradient,) = ctx.saved_tensors, ctx.bounds, gradients
        # A step goes against the gradient.
        outwards = ((values < low) & (gradient > 0)) | ((values > high) & (gradient < 0))
        return gradient.masked_fill(outwards, 0.0), None, None


def at_least_float32(values: th.Tensor) -> th.Tensor:
    """
    :param values: Outputs of a network, which are of half precision under autocast
    :return: The same in float32, or in float64 if they are
    """
    return values if values.dtype == th.float64 else values.float()
