"""A transformer that sees exactly the last ``context_length`` steps of an episode."""

from __future__ import annotations

import math
from copy import copy

import torch as th
from torch import nn


class GRUGate(nn.Module):
    """
    Gate that joins the input and the output of a layer, as in GTrXL; initially it passes mostly the input.

    Paper: https://arxiv.org/abs/1910.06764

    :param d_model: Size of the input and of the output
    :param bias: Initial bias towards the input
    """

    def __init__(self, d_model: int, bias: float = 2.0):
        super().__init__()
        self.of_input = nn.Linear(d_model, 2 * d_model, bias=False)
        self.of_output = nn.Linear(d_model, 3 * d_model, bias=False)
        self.of_reset = nn.Linear(d_model, d_model, bias=False)
        self.bias = nn.Parameter(th.full((d_model,), bias))

    def forward(self, inputs: th.Tensor, outputs: th.Tensor) -> th.Tensor:
        """
        :param inputs: Inputs of the layer, shape ``(..., d_model)``
        :param outputs: Outputs of the layer, shape ``(..., d_model)``
        :return: Joined inputs and outputs, shape ``(..., d_model)``
        """
        reset, update = self.of_input(inputs).chunk(2, dim=-1)
        of_reset, of_update, candidate = self.of_output(outputs).chunk(3, dim=-1)
        reset = th.sigmoid(reset + of_reset)
        update = th.sigmoid(update + of_update - self.bias)
        candidate = th.tanh(candidate + self.of_reset(reset * inputs))
        return th.lerp(inputs, candidate, update)


class Residual(nn.Module):
    """Residual connection: adds the output of a layer to its input."""

    def forward(self, inputs: th.Tensor, outputs: th.Tensor) -> th.Tensor:
        """
        :param inputs: Inputs of the layer, shape ``(..., d_model)``
        :param outputs: Outputs of the layer, shape ``(..., d_model)``
        :return: Joined inputs and outputs, shape ``(..., d_model)``
        """
        return inputs + outputs


class Block(nn.Module):
    """
    Attention to the last tokens, then perhaps a feed-forward network of two linear layers, each with a LayerNorm before it.

    The attention of a head depends on the tokens and on their distance in time: a score is learned for each distance.
    Initially some heads prefer the newest tokens and others treat all alike, as in ALiBi (https://arxiv.org/abs/2108.12409).
    Each head has an attention sink (https://arxiv.org/abs/2309.17453), a score without a token that takes a part of the
    attention, so that a head can attend to nothing, and to more the more it has seen: the mean of what has been seen, which
    attention is otherwise, does not tell how often something was seen.

    What has been attended to is multiplied by factors that the token chooses, initially by 1, as in gated attention
    (https://arxiv.org/abs/2505.06708). Which of several things remembered matters at present is then a single product.

    :param span: Number of steps that the block looks back
    :param d_model: Size of a token
    :param n_heads: Number of attention heads
    :param ffn_dim: Hidden size of the feed-forward network, ``None`` for no such network
    :param gate: Whether a :class:`GRUGate` joins inputs and outputs; otherwise they are added
    """

    # What LayerNorm adds to the variance. The usual 1e-5 scales the tokens of all observations to the same length, and with
    # them the noise of small ones: then single steps can be told apart, and a few epochs learn their advantages by heart.
    NORM_EPS = 1.0
    # The scores of distances and sinks are parameters times this: with steps as small as those of the weights, the attention
    # would take a whole training to settle on a distance.
    SCORE_SCALE = 8.0
    # What a sink weighs initially, in full contexts. Heavier sinks learn faster to count, but take away from what is to be
    # remembered: with 1, a cue of 30 steps before is not always learned.
    SINK_WEIGHT = 1 / 8
    # Parameter of a sink without any weight, for blocks that were saved without sinks
    NO_SINK = -100.0

    def __init__(self, span: int, d_model: int, n_heads: int, ffn_dim: int | None, gate: bool):
        super().__init__()
        self.span, self.n_heads = span, n_heads
        self.norm = nn.LayerNorm(d_model, eps=self.NORM_EPS)
        self.query = nn.Linear(d_model, d_model)
        self.key_value = nn.Linear(d_model, 2 * d_model)
        self.factors = nn.Linear(d_model, d_model, bias=False)
        self.out = nn.Linear(d_model, d_model)
        slopes = th.tensor([0.0 if head == n_heads - 1 else 2.0**-head for head in range(n_heads)])
        scores = -slopes[:, None] * th.arange(span + 1)
        self.distance_scores = nn.Parameter(scores / self.SCORE_SCALE)
        sinks = th.logsumexp(scores, dim=1) + math.log(self.SINK_WEIGHT)
        self.sink_scores = nn.Parameter(sinks / self.SCORE_SCALE)
        self.join_attention = GRUGate(d_model) if gate else Residual()
        self.ffn: nn.Sequential | None = None
        if ffn_dim is not None:
            norm = nn.LayerNorm(d_model, eps=self.NORM_EPS)
            self.ffn = nn.Sequential(norm, nn.Linear(d_model, ffn_dim), nn.GELU(), nn.Linear(ffn_dim, d_model))
            self.join_ffn = GRUGate(d_model) if gate else Residual()

    def init_weights(self) -> None:
        """Orthogonal initialisation, small for what is added to a token: initially a policy acts on the current step alone."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.zeros_(self.factors.weight)
        for last in (self.out,) if self.ffn is None else (self.out, self.ffn[-1]):
            nn.init.orthogonal_(last.weight, gain=0.1)  # type: ignore[arg-type]

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *args: object, **kwargs: object) -> None:
        if f"{prefix}distance_scores" in state_dict:
            state_dict.setdefault(f"{prefix}sink_scores", th.full_like(self.sink_scores, self.NO_SINK))
            state_dict.setdefault(f"{prefix}factors.weight", th.zeros_like(self.factors.weight))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def keys_values(self, tokens: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        :param tokens: Tokens, shape ``(batch_size, n, d_model)``
        :return: Keys and values of the attention, both of shape ``(batch_size, n, d_model)``
        """
        keys, values = self.key_value(self.norm(tokens)).chunk(2, dim=-1)
        return keys, values

    def forward(self, tokens: th.Tensor, keys: th.Tensor, values: th.Tensor, visible: th.Tensor) -> th.Tensor:
        """
        :param tokens: Tokens, shape ``(batch_size, n, d_model)``
        :param keys: Keys of these tokens and of the ``span`` tokens before them, shape ``(batch_size, span + n, d_model)``
        :param values: Values of the same tokens, shape ``(batch_size, span + n, d_model)``
        :param visible: Whether each token may attend to each of those with keys, if it is within the span, shape
            ``(batch_size, n, span + n)``
        :return: New tokens, shape ``(batch_size, n, d_model)``
        """
        attended = (self.attention(tokens, keys, visible) @ self._heads(values)).transpose(1, 2).flatten(2)
        attended = attended * (1.0 + self.factors(self.norm(tokens)))
        tokens = self.join_attention(tokens, self.out(attended))
        return tokens if self.ffn is None else self.join_ffn(tokens, self.ffn(tokens))

    def attention(self, tokens: th.Tensor, keys: th.Tensor, visible: th.Tensor) -> th.Tensor:
        """
        Arguments are those of :meth:`forward`.

        :return: Weight of each of those with keys in each head, shape ``(batch_size, n_heads, n, span + n)``. Their sum is 1
            minus the weight of the sink
        """
        queries, keys = self._heads(self.query(self.norm(tokens))), self._heads(keys)
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
        distances = self.distances(tokens.shape[1], tokens.device)
        is_outside = (distances < 0) | (distances > self.span)
        # Not `distances.clamp(0, self.span)`: Inductor cannot compile it for CUDA as an index before the `cat` below.
        scores = scores + self.SCORE_SCALE * self.distance_scores[:, th.where(is_outside, 0, distances)]
        hidden = ~visible | is_outside
        scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
        sinks = (self.SCORE_SCALE * self.sink_scores)[:, None, None].expand(*scores.shape[:-1], 1)
        return th.softmax(th.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]

    def distances(self, n: int, device: th.device) -> th.Tensor:
        """
        :param n: Number of tokens
        :param device: Device of the result
        :return: Number of steps by which each token is later than each of those with keys, shape ``(n, span + n)``
        """
        steps = th.arange(self.span + n, device=device)
        return steps[self.span :, None] - steps

    def _heads(self, x: th.Tensor) -> th.Tensor:
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)


class Stem(nn.Module):
    """
    Linear embedding of the features of the last few steps, stacked like frames, as a token.

    :param span: Number of steps that it looks back
    :param features_dim: Size of the features of one step
    :param d_model: Size of a token
    """

    def __init__(self, span: int, features_dim: int, d_model: int):
        super().__init__()
        self.span = span
        self.linear = nn.Linear((span + 1) * features_dim, d_model)
        nn.init.orthogonal_(self.linear.weight, gain=math.sqrt(2))
        nn.init.zeros_(self.linear.bias)

    def stacked(self, features: th.Tensor, episodes: th.Tensor) -> th.Tensor:
        """
        :param features: Features of successive steps, shape ``(batch_size, span + n, features_dim)``
        :param episodes: Episode number of each step, see :meth:`Transformer.forward`, shape ``(batch_size, span + n)``
        :return: Features of each step and of the ``span`` steps before it, zero for those of other episodes, shape
            ``(batch_size, n, (span + 1) * features_dim)``
        """
        n = features.shape[1] - self.span
        now = episodes[:, self.span :]
        if n == 1:  # the same in three operations, for steps by themselves
            return features.masked_fill((episodes != now).unsqueeze(2), 0.0).flatten(1).unsqueeze(1)
        frames = []
        for first in range(self.span + 1):
            is_other = episodes[:, first : first + n] != now
            frames.append(features[:, first : first + n].masked_fill(is_other.unsqueeze(2), 0.0))
        return th.cat(frames, dim=2)

    def forward(self, stacked: th.Tensor) -> th.Tensor:
        """
        :param stacked: Features of each step and of the steps before it, as :meth:`stacked` returns them
        :return: Tokens, shape ``(batch_size, n, d_model)``
        """
        return self.linear(stacked)


class Cache:
    """
    Keys, values and features of the steps so far. They are valid as long as the weights stay the same.

    :param transformer: Transformer that fills the cache
    :param n_sequences: Number of sequences
    :param capacity: Maximum number of steps of each sequence
    """

    def __init__(self, transformer: Transformer, n_sequences: int, capacity: int):
        weight = transformer.stem.linear.weight
        # Features of the last steps, which the stem still needs
        self.features = weight.new_zeros(n_sequences, transformer.stem.span, transformer.features_dim)
        self.episodes = weight.new_zeros(n_sequences, capacity, dtype=th.long)
        shape = (n_sequences, capacity, transformer.d_model)
        self.keys, self.values = ([weight.new_zeros(shape) for _ in transformer.blocks] for _ in range(2))
        self.length = 0

    def without_oldest(self, episodes: th.Tensor) -> Cache:
        """
        :param episodes: Episode numbers of the remaining steps and of the next one, shape ``(n_sequences, capacity)``
        :return: Copy of a full cache without its oldest step, with room for the next one
        """
        rolled = copy(self)
        rolled.episodes = episodes
        rolled.keys, rolled.values = ([part.roll(-1, 1) for part in parts] for parts in (self.keys, self.values))
        rolled.length = self.length - 1
        return rolled


class Transformer(nn.Module):
    """
    Turns a sequence of features into the features of a history-based policy.

    The output features of a step are the features of this step and of a few before it, as in frame stacking, and a token
    with information from all steps of the context. A :class:`Stem` makes this token from the same few steps, so that it
    contains velocities from the start, and the blocks add information from earlier tokens. The first block attends to tokens
    of single steps: overlapping tokens would mix what happened at a step with what happened before and after it. Each block
    looks back some steps, all together ``context_length - 1``. Nothing is computed for the first steps of a sequence, because
    their history is not known: each block makes the sequence shorter, like a convolution without padding.

    :param features_dim: Size of the features of one step
    :param context_length: Number of steps that the transformer sees, including the current one, at least 1
    :param d_model: Size of a token, a multiple of ``n_heads``
    :param n_heads: Number of attention heads
    :param n_layers: Number of blocks, which divide the steps to look back among them
    :param ffn_dim: Hidden size of the feed-forward networks of the blocks, ``None`` for none: the networks of actor and critic
        follow
    :param gate: Whether the blocks are gated, see :class:`GRUGate`
    :param n_stacked: Number of steps that are stacked, at most as many as the first block sees
    """

    # A token has many more numbers than the stacked features. At their full size, they would make most of the outputs of actor
    # and critic, and each step of the optimiser would change these the more.
    TOKEN_SCALE = 0.25

    def __init__(
        self,
        features_dim: int,
        context_length: int,
        d_model: int = 64,
        n_heads: int = 4,
        n_layers: int = 1,
        ffn_dim: int | None = None,
        gate: bool = False,
        n_stacked: int = 4,
    ):
        super().__init__()
        self.features_dim, self.d_model = features_dim, d_model
        back = context_length - 1
        spans = [back * (i + 1) // n_layers - back * i // n_layers for i in range(n_layers)]
        self.stem = Stem(min(n_stacked - 1, spans[0]), features_dim, d_model)
        self.single = Stem(0, features_dim, d_model)
        self.blocks = nn.ModuleList(Block(span, d_model, n_heads, ffn_dim, gate) for span in spans)
        for block in self.layers:
            block.init_weights()

    @property
    def layers(self) -> list[Block]:
        """The blocks as a list."""
        return list(self.blocks)  # type: ignore[arg-type]

    @property
    def n_outputs(self) -> int:
        """Number of output features of each step."""
        return self.stem.linear.in_features + self.d_model

    def forward(self, features: th.Tensor, episodes: th.Tensor, cache: Cache | None = None) -> th.Tensor:
        """
        :param features: Features of successive steps, shape ``(n_sequences, context_length - 1 + n, features_dim)``
        :param episodes: Episode number of each step; a step sees earlier steps with the same number only, shape
            ``(n_sequences, context_length - 1 + n)``
        :param cache: Empty cache to be filled with these steps, ``None`` for no cache
        :return: Output features of the last n steps, shape ``(n_sequences, n, n_outputs)``
        """
        first = self.layers[0].span - self.stem.span
        stacked = self.stem.stacked(features[:, first:], episodes[:, first:])
        present, tokens, start = self.stem(stacked), self.single(features), 0
        for layer, block in enumerate(self.layers):
            keys, values = block.keys_values(tokens)
            if cache is not None:
                cache.keys[layer][:, start : episodes.shape[1]] = keys
                cache.values[layer][:, start : episodes.shape[1]] = values
            visible = _same(episodes[:, start + block.span :], episodes[:, start:])
            tokens = block(present if layer == 0 else tokens[:, block.span :], keys, values, visible)
            start += block.span
        if cache is not None:
            cache.length = episodes.shape[1]
            cache.features, cache.episodes[:, : cache.length] = features[:, cache.length - self.stem.span :], episodes
        return self._outputs(stacked[:, start - self.layers[0].span :], tokens)

    def step(self, features: th.Tensor, episodes: th.Tensor, cache: Cache) -> th.Tensor:
        """
        Like :meth:`forward`, for the one step after those in the cache. The step is added to the cache.

        :param features: Features of the step, shape ``(n_sequences, features_dim)``
        :param episodes: Episode number of the step in each sequence, shape ``(n_sequences,)``
        :param cache: Cache with at least ``context_length - 1`` steps
        :return: Output features of the step, shape ``(n_sequences, n_outputs)``
        """
        now = cache.length
        cache.episodes[:, now] = episodes
        known = th.cat([cache.features, features.unsqueeze(1)], dim=1)
        cache.features = known[:, 1:]
        stacked = self.stem.stacked(known, cache.episodes[:, now - self.stem.span : now + 1])
        present, tokens = self.stem(stacked), self.single(features.unsqueeze(1))
        for layer, block in enumerate(self.layers):
            cache.keys[layer][:, now : now + 1], cache.values[layer][:, now : now + 1] = block.keys_values(tokens)
            seen = slice(now - block.span, now + 1)
            visible = _same(cache.episodes[:, now : now + 1], cache.episodes[:, seen])
            queries = present if layer == 0 else tokens
            tokens = block(queries, cache.keys[layer][:, seen], cache.values[layer][:, seen], visible)
        cache.length += 1
        return self._outputs(stacked, tokens).squeeze(1)

    def _outputs(self, stacked: th.Tensor, tokens: th.Tensor) -> th.Tensor:
        return th.cat([stacked, self.TOKEN_SCALE * tokens], dim=2)


def _same(ones: th.Tensor, others: th.Tensor) -> th.Tensor:
    """Which numbers are equal, shape ``(batch_size, n, m)`` for shapes ``(batch_size, n)`` and ``(batch_size, m)``."""
    return ones.unsqueeze(2) == others.unsqueeze(1)
