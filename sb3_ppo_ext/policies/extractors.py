"""A features extractor for observations that are already sequences or sets, for any algorithm of SB3."""

from __future__ import annotations

from collections.abc import Callable

import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_flattened_obs_dim
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

from sb3_ppo_ext.common.type_aliases import Arrays
from sb3_ppo_ext.common.validation import check_sizes, refuse


class TransformerExtractor(BaseFeaturesExtractor):
    """
    A transformer that reads a sequence of frames, or a set of entities: ``features_extractor_class=TransformerExtractor``.

    The observation space is one of

    - a ``Box`` of shape ``(n_tokens, token_dim)``, a sequence;
    - a ``Box`` with one dimension, in which ``VecFrameStack`` has stacked ``n_frames`` frames;
    - a ``Dict`` whose part ``tokens_key`` is a ``Box`` of shape ``(n_tokens, token_dim)``: a set of tokens, in any
      order. The part ``mask_key``, if there is one, tells which tokens are present. All other parts are flattened and given to
      the transformer as well.

    :param observation_space: Observation space
    :param d_model: Size of the embedding of a token, and of the features, a multiple of ``n_heads``
    :param n_heads: Number of attention heads
    :param n_layers: Number of layers
    :param ffn_dim: Hidden size of the feed-forward networks of the layers, ``2 * d_model`` by default
    :param n_frames: Number of frames that a ``Box`` with one dimension holds
    :param tokens_key: Key of the set of tokens in a ``Dict``
    :param mask_key: Key of the mask in a ``Dict``, 1 for tokens that are present and 0 for the others, shape ``(n_tokens,)``;
        ``None`` if all tokens are always present
    :raises ValueError: if an argument is not valid, or the observation space is none of these
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        d_model: int = 64,
        n_heads: int = 4,
        n_layers: int = 1,
        ffn_dim: int | None = None,
        n_frames: int | None = None,
        tokens_key: str = "entities",
        mask_key: str | None = None,
    ):
        check_sizes(dict(d_model=d_model))
        ffn_dim = 2 * d_model if ffn_dim is None else ffn_dim
        check_sizes(dict(d_model=d_model, n_heads=n_heads, n_layers=n_layers, ffn_dim=ffn_dim))
        if d_model % n_heads != 0:
            refuse("d_model", d_model, f"it must be a multiple of n_heads={n_heads}")
        super().__init__(observation_space, features_dim=d_model)
        self.tokens_key, self.mask_key = tokens_key, mask_key
        self.n_tokens, token_dim = self._find_tokens(observation_space, n_frames)
        self.other_keys: list[str] = []
        other_dim = 0
        if isinstance(observation_space, spaces.Dict):
            self.other_keys = [key for key in observation_space.spaces if key not in (tokens_key, mask_key)]
            other_dim = sum(get_flattened_obs_dim(observation_space[key]) for key in self.other_keys)
        self.embedding = nn.Linear(token_dim, d_model)
        # The order of a set does not matter: its tokens share one position.
        n_positions = 1 if isinstance(observation_space, spaces.Dict) else self.n_tokens
        self.places = nn.Parameter(th.randn(n_positions, d_model) / d_model**0.5)
        # An additional token that attends to all others; its output is the features.
        self.reader = nn.Parameter(th.randn(1, d_model) / d_model**0.5)
        self.read_others = nn.Linear(other_dim, d_model) if other_dim > 0 else None
        layer = nn.TransformerEncoderLayer(d_model, n_heads, ffn_dim, dropout=0.0, norm_first=True, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)

    def _find_tokens(self, space: spaces.Space, n_frames: int | None) -> tuple[int, int]:
        """The number of tokens and their size."""
        if isinstance(space, spaces.Dict):
            if self.tokens_key not in space.spaces:
                refuse("tokens_key", self.tokens_key, f"the observation has {', '.join(space.spaces)}")
            if self.mask_key is not None and self.mask_key not in space.spaces:
                refuse("mask_key", self.mask_key, f"the observation has {', '.join(space.spaces)}; give one of them, or None")
            space = space[self.tokens_key]
        shape = space.shape if isinstance(space, spaces.Box) else None
        if shape is not None and len(shape) == 2:
            return shape
        if shape is None or len(shape) != 1:
            refuse("observation_space", space, "give a `Box` of shape (n_tokens, token_dim), or one with stacked vectors")
        if n_frames is None or shape[0] % n_frames != 0:
            refuse("n_frames", n_frames, f"the observation has {shape[0]} numbers; give the number of stacked vectors")
        return n_frames, shape[0] // n_frames

    def apply(self, fn: Callable[[nn.Module], None]) -> TransformerExtractor:
        """
        SB3's policies call this for the orthogonal initialisation of all linear layers of a features extractor. Those of a
        transformer keep their own initialisation.

        :param fn: Function, which is not called
        :return: The features extractor itself
        """
        return self

    def forward(self, observations: Arrays) -> th.Tensor:
        """
        :param observations: Observations as SB3 preprocesses them, a tensor or a dictionary of tensors
        :return: Features, shape ``(batch_size, d_model)``
        """
        tokens, hidden, reader = observations, None, self.reader
        if isinstance(observations, dict):
            tokens = observations[self.tokens_key]
            if self.read_others is not None:
                others = [observations[key].flatten(start_dim=1) for key in self.other_keys]
                reader = reader + self.read_others(th.cat(others, dim=1)).unsqueeze(1)
            if self.mask_key is not None:
                hidden = observations[self.mask_key].reshape(-1, self.n_tokens) < 0.5
                # The additional token is never masked.
                hidden = th.cat([hidden, hidden.new_zeros(len(hidden), 1)], dim=1)
        tokens = self.embedding(tokens.reshape(len(tokens), self.n_tokens, -1)) + self.places
        sequence = th.cat([tokens, reader.expand(len(tokens), 1, -1)], dim=1)
        return self.encoder(sequence, src_key_padding_mask=hidden)[:, -1]
