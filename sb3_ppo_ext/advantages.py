"""What becomes of the advantages before the policy loss uses them."""

import torch as th


def normalize(advantages: th.Tensor) -> th.Tensor:
    """
    Shift and scale to mean 0 and standard deviation 1: ``(A - mean) / (std + 1e-8)``.

    :param advantages: Shape ``(batch_size,)``
    :return: The same shape; a single advantage is returned as it is, for its standard deviation is not defined
        (`issue #325 <https://github.com/DLR-RM/stable-baselines3/issues/325>`_)
    """
    if len(advantages) <= 1:
        return advantages
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)
