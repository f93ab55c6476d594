"""Base classes of all action distributions, for their PyTorch and their NumPy implementations."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch as th
from stable_baselines3.common.distributions import Distribution
from torch import nn

from sb3_ppo_ext.common.type_aliases import Arrays

# Action that `get_actions(deterministic=True)` returns
DeterministicAction = Literal["mean", "mode"]
# Function from outputs and noise to samples
Sampler = Callable[[np.ndarray, np.ndarray], np.ndarray]
LOG_2, LOG_2_PI = math.log(2), math.log(2 * math.pi)
# Smallest distance of an action from a bound, as a fraction of the width: at the bound, logarithms would be infinite.
EDGE = 1e-6
# Distance from a bound that counts as near in the statistics, as a fraction of the width
NEAR = 0.01
# Maximum number of distributions that the statistics are computed from
MAX_STATISTICS = 2048


class BoundedDistribution(Distribution):
    """
    An action distribution that respects the bounds of a ``Box``.

    It inherits SB3's ``Distribution``, and works with any code for these. It samples and evaluates *latents*, shape
    ``(batch_size, action_dim)``: :meth:`position` turns a latent into the position of the action between its bounds,
    independently of the parameters of the policy. Densities and entropies are those of the action in units of the bounds (-1
    at ``low``, 1 at ``high``), in nats, whatever the bounds are.

    :param action_dim: Dimension of the action space
    :param deterministic_action: Action that ``get_actions(deterministic=True)`` returns, if the distribution supports several
    """

    # Smallest and largest latent
    latent_range = (-math.inf, math.inf)

    def __init__(self, action_dim: int, deterministic_action: DeterministicAction = "mean"):
        super().__init__()
        self.action_dim = action_dim
        self.deterministic_action = deterministic_action

    @staticmethod
    @abstractmethod
    def position(latents: np.ndarray) -> np.ndarray:
        """
        :param latents: Latents, any shape
        :return: Positions of the actions between their bounds, from 0 (``low``) to 1 (``high``), the same shape
        """

    @staticmethod
    @abstractmethod
    def position_of_tensor(latents: th.Tensor) -> th.Tensor:
        """
        :meth:`position` on the device of the latents.

        :param latents: Latents, any shape
        :return: Positions of the actions between their bounds, from 0 to 1, the same shape
        """

    @staticmethod
    @abstractmethod
    def latents(position: np.ndarray) -> np.ndarray:
        """
        Inverse of :meth:`position`, except for actions closer than a millionth of the width to a bound: these get the latent
        of the nearest action that is not.

        :param position: Positions of actions between their bounds, from 0 to 1, any shape
        :return: Latents of these actions, as ``log_prob`` takes them, the same shape
        """

    @abstractmethod
    def parameters(self) -> th.Tensor:
        """
        :return: Parameters that define the distribution, shape ``(batch_size, 2 * action_dim)``
        """

    @staticmethod
    @abstractmethod
    def statistics(parameters: th.Tensor) -> dict[str, float]:
        """
        :param parameters: :meth:`parameters` of the distributions for many observations, shape ``(n, 2 * action_dim)``
        :return: Statistics to log, by name. One of them is ``mass_near_bounds``, the probability of actions
            closer to a bound than 1 % of the width
        """

    def actions_from_params(self, *args: object, deterministic: bool = False) -> th.Tensor:
        return self.proba_distribution(*args).get_actions(deterministic)

    def log_prob_from_params(self, *args: object) -> tuple[th.Tensor, th.Tensor]:
        latents = self.actions_from_params(*args)
        return latents, self.log_prob(latents)


def bounded_part(distribution: object) -> BoundedDistribution | None:
    """
    :param distribution: A distribution
    :return: What samples latents: the distribution itself if it is bounded, or that of the ``Box`` parts of a hybrid one,
        whose columns come first; ``None`` if nothing does
    """
    part = getattr(distribution, "continuous", distribution)
    return part if isinstance(part, BoundedDistribution) else None


class NumpyDistribution(ABC):
    """
    NumPy implementation of an action distribution, for the native engine: samples, log probabilities and their gradients from
    the outputs of a policy's output layer, where PyTorch would spend most of its time on the overhead of calls.

    :param distribution: Action distribution of the policy (``policy.action_dist``)
    :param log_std: Parameter ``log_std`` of the policy, ``None`` if it has none
    """

    # Whether each row of outputs is followed by the latent features that the output layer computes them from
    needs_latents = False

    def __init__(self, distribution: Distribution, log_std: nn.Parameter | None):
        self.distribution = distribution
        self.log_std = log_std
        # The values of `log_std` (in the same memory) and its gradient, if there is one
        self.parameter: Any = None if log_std is None else log_std.detach().numpy()
        self.d_log_std: Any = None if log_std is None else np.zeros_like(self.parameter)

    @classmethod
    def why_not(cls, distribution: Distribution) -> str | None:
        """
        :param distribution: Distribution of this family
        :return: Reason why it has no NumPy implementation, ``None`` if it has one
        """
        return None

    def pack(self) -> None:  # noqa: B027  # there may be nothing to do
        """Update everything derived from ``log_std`` after its values have changed."""

    def has_spread(self) -> bool:
        """:return: Whether PyTorch accepts the standard deviations that do not depend on observations: those greater than 0"""
        return True

    def noise(self, n_steps: int, n_envs: int, n_outputs: int) -> Arrays:
        """
        :param n_steps: Number of steps of the rollout
        :param n_envs: Number of environments
        :param n_outputs: Number of outputs of the output layer
        :return: Random numbers of each step, a sequence of length ``n_steps``; :meth:`scaled` takes one of its elements or the
            whole sequence. They do not depend on the parameters, which may change after they were drawn
        """
        return [None] * n_steps

    def with_normal(self, noise: Arrays, normal: np.ndarray) -> Arrays:
        """
        :param noise: Random numbers from :meth:`noise`
        :param normal: Standard normal numbers for the samples of a Gaussian, shape ``(n_steps, n_envs, n)``
        :return: The random numbers with these in the place of those of the Gaussian
        """
        raise TypeError(f"{type(self).__name__} is no Gaussian")

    def scaled(self, noise: Arrays) -> Arrays:
        """
        :param noise: Random numbers from :meth:`noise`
        :return: Noise that :meth:`sample` takes, scaled by the current parameters
        """
        return noise

    @abstractmethod
    def sampler(self) -> Sampler | None:
        """
        :return: Function from outputs and :meth:`scaled` noise to samples that computes each row by itself, and can be
            pickled; ``None`` if there is none, since samples need further random numbers
        """

    def sample(self, outputs: np.ndarray, noise: Arrays) -> np.ndarray:
        """
        :param outputs: Outputs of the output layer, shape ``(n_envs, n_outputs)``
        :param noise: Noise of this step, from :meth:`scaled`
        :return: Actions as the rollout buffer stores them, shape ``(n_envs, action_dim)``, or ``(n_envs,)`` if they are
            discrete
        """
        sampler = self.sampler()
        assert sampler is not None
        return sampler(outputs, noise)

    def compiled(self) -> tuple[str, tuple[int, ...]] | None:
        """
        :return: Name of the family, and number of outputs of each action, with which the extension module computes
            :meth:`log_prob`, :meth:`entropies` and :meth:`gradient`; ``None`` if it does not
        """
        return None

    @abstractmethod
    def log_prob(self, outputs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """
        :param outputs: Outputs of the output layer, shape ``(batch_size, n_outputs)``
        :param actions: Actions as the rollout buffer stores them, shape ``(batch_size, action_dim)``
        :return: Log probabilities of the actions, shape ``(batch_size,)``
        """

    @property
    def n_described(self) -> int:
        """Number of columns of :meth:`described`, of a distribution that is compiled."""
        compiled = self.compiled()
        assert compiled is not None
        return sum(compiled[1]) + (0 if self.log_std is None else len(self.parameter))

    def described(self, outputs: np.ndarray) -> np.ndarray:
        """
        :param outputs: Outputs that :meth:`log_prob` was last called with, shape ``(batch_size, n_outputs)``
        :return: Descriptions of the distributions, from which :meth:`entropies` and :meth:`parameters` can be computed after
            the policy has changed, shape ``(batch_size, n)``
        """
        if self.log_std is None:
            return outputs
        n_outputs, n_stds = outputs.shape[1], len(self.parameter)
        described = np.empty((len(outputs), n_outputs + n_stds), outputs.dtype)
        described[:, :n_outputs] = outputs
        described[:, n_outputs:] = self.parameter
        return described

    def entropies(self, described: np.ndarray) -> np.ndarray:
        """
        :param described: Descriptions from :meth:`described`, shape ``(batch_size, n)``
        :return: Entropies in nats, shape ``(batch_size,)``
        """
        with th.no_grad():
            entropies = self._restored(described).entropy()
            return entropies.numpy()

    def parameters(self, described: np.ndarray) -> th.Tensor | None:
        """
        :param described: Descriptions from :meth:`described`, shape ``(batch_size, n)``
        :return: Parameters of bounded distributions (see :meth:`BoundedDistribution.parameters`), ``None`` for others
        """
        with th.no_grad():
            bounded = None if bounded_part(self.distribution) is None else bounded_part(self._restored(described))
            return None if bounded is None else bounded.parameters()

    def _restored(self, described: np.ndarray) -> Any:
        rows = th.from_numpy(described)
        if self.log_std is None:
            return self.make(rows)
        n_stds = len(self.parameter)
        return self.make(*rows.split([rows.shape[1] - n_stds, n_stds], dim=1))

    def make(self, outputs: th.Tensor, log_std: th.Tensor | None = None) -> Distribution:
        """
        :param outputs: Outputs of the output layer, shape ``(batch_size, n_outputs)``
        :param log_std: Logarithms of the standard deviations; by default the policy's parameter ``log_std``
        :return: PyTorch distribution, differentiable in both
        """
        own = () if self.log_std is None else (self.log_std if log_std is None else log_std,)
        return self.distribution.proba_distribution(outputs, *own)

    def gradient(self, d_log_prob: np.ndarray, ent_coef: float, accumulate: bool = False) -> np.ndarray:
        """
        Gradient of a loss that depends on the log probabilities that :meth:`log_prob` last returned, plus ``ent_coef`` times
        the entropy loss (minus the mean entropy). The gradient with respect to ``log_std`` is written to ``d_log_std``.

        :param d_log_prob: Derivatives of the loss with respect to the log probabilities, shape ``(batch_size,)``
        :param ent_coef: Entropy coefficient
        :param accumulate: Whether the gradient with respect to ``log_std`` is added to ``d_log_std`` instead of replacing it
        :return: Gradient with respect to the outputs, shape ``(batch_size, n_outputs)``
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
        """:return: Gradients with respect to the outputs and to ``log_std``, the latter ``None`` if it is not learned"""


def clamp(values: th.Tensor, low: float, high: float) -> th.Tensor:
    """
    ``values.clamp(low, high)`` for values that are optimised. Outside the range, a gradient that leads back into it is kept,
    where that of the usual clamp stays 0 forever; a gradient that leads further out becomes 0.

    :param values: Values, any shape
    :param low: Lower bound
    :param high: Upper bound
    :return: Values within the bounds, the same shape
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
        # Gradient descent goes against the gradient.
        outwards = ((values < low) & (gradient > 0)) | ((values > high) & (gradient < 0))
        return gradient.masked_fill(outwards, 0.0), None, None


def at_least_float32(values: th.Tensor) -> th.Tensor:
    """
    :param values: Outputs of a network, in half precision under autocast
    :return: The same values in float32, or in float64 if they are float64
    """
    return values if values.dtype == th.float64 else values.float()
