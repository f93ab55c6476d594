"""A transformer that sees the last steps of an episode, exactly as many as it is told to."""

from __future__ import annotations

import math

import torch as th
from torch import nn


class GRUGate(nn.Module):
    """
    Joins a layer's input with its output, as GTrXL does; at the start it lets mostly the input through.

    Paper: https://arxiv.org/abs/1910.06764

    :param d_model: Size of both
    :param bias: How strongly it prefers the input at the start
    """

    def __init__(self, d_model: int, bias: float = 2.0):
        super().__init__()
        self.of_input = nn.Linear(d_model, 2 * d_model, bias=False)
        self.of_output = nn.Linear(d_model, 3 * d_model, bias=False)
        self.of_reset = nn.Linear(d_model, d_model, bias=False)
        self.bias = nn.Parameter(th.full((d_model,), bias))

    def forward(self, inputs: th.Tensor, outputs: th.Tensor) -> th.Tensor:
        """
        :param inputs: Of the layer, shape ``(..., d_model)``
        :param outputs: Of the layer, the same shape
        :return: The same shape
        """
        reset, update = self.of_input(inputs).chunk(2, dim=-1)
        of_reset, of_update, candidate = self.of_output(outputs).chunk(3, dim=-1)
        reset = th.sigmoid(reset + of_reset)
        update = th.sigmoid(update + of_update - self.bias)
        candidate = th.tanh(candidate + self.of_reset(reset * inputs))
        return th.lerp(inputs, candidate, update)


class Residual(nn.Module):
    """Joins a layer's input with its output by addition."""

    def forward(self, inputs: th.Tensor, outputs: th.Tensor) -> th.Tensor:
        """
        :param inputs: Of the layer, shape ``(..., d_model)``
        :param outputs: Of the layer, the same shape
        :return: The same shape
        """
        return inputs + outputs


class Block(nn.Module):
    """
    Attention to the last tokens, then two linear layers, each behind a LayerNorm.

    What a head pays attention to depends on the tokens and on how long ago they were: a score is learned for each distance. At
    the start some heads prefer the newest tokens and others treat all alike, as in ALiBi (https://arxiv.org/abs/2108.12409).

    :param span: How many steps it looks back
    :param d_model: Size of a token
    :param n_heads: Of the attention
    :param ffn_dim: Size of the hidden linear layer
    :param gate: Whether a :class:`GRUGate` joins inputs and outputs; else they are added
    """

    # Scores of distances are parameters times this: by steps as small as those of the weights, attention would take a whole
    # training to settle on a distance.
    DISTANCE_SCALE = 8.0

    def __init__(self, span: int, d_model: int, n_heads: int, ffn_dim: int, gate: bool):
        super().__init__()
        self.span, self.n_heads = span, n_heads
        self.norm = nn.LayerNorm(d_model)
        self.query = nn.Linear(d_model, d_model)
        self.key_value = nn.Linear(d_model, 2 * d_model)
        self.out = nn.Linear(d_model, d_model)
        slopes = th.tensor([0.0 if head == n_heads - 1 else 2.0**-head for head in range(n_heads)])
        self.distance_scores = nn.Parameter(-slopes[:, None] * th.arange(span + 1) / self.DISTANCE_SCALE)
        self.ffn = nn.Sequential(nn.LayerNorm(d_model), nn.Linear(d_model, ffn_dim), nn.GELU(), nn.Linear(ffn_dim, d_model))
        self.join_attention, self.join_ffn = (GRUGate(d_model) if gate else Residual() for _ in range(2))

    def init_weights(self) -> None:
        """Orthogonal; what is added to a token is small at first, so that a policy starts from the present alone."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for last in (self.out, self.ffn[-1]):
            nn.init.orthogonal_(last.weight, gain=0.1)  # type: ignore[arg-type]

    def keys_values(self, tokens: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        :param tokens: Shape ``(batch_size, n, d_model)``
        :return: What later tokens read of them, both of shape ``(batch_size, n, d_model)``
        """
        keys, values = self.key_value(self.norm(tokens)).chunk(2, dim=-1)
        return keys, values

    def forward(self, tokens: th.Tensor, keys: th.Tensor, values: th.Tensor, visible: th.Tensor) -> th.Tensor:
        """
        :param tokens: Shape ``(batch_size, n, d_model)``
        :param keys: Of the ``span`` tokens before them and of themselves, shape ``(batch_size, span + n, d_model)``
        :param values: As the keys
        :param visible: Which of those each token may see, as far as it looks back, shape ``(batch_size, n, span + n)``
        :return: Shape ``(batch_size, n, d_model)``
        """
        queries, keys, values = (self._heads(x) for x in (self.query(self.norm(tokens)), keys, values))
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
        distances = self.distances(tokens.shape[1], tokens.device)
        scores = scores + self.DISTANCE_SCALE * self.distance_scores[:, distances.clamp(0, self.span)]
        hidden = ~visible | (distances < 0) | (distances > self.span)
        weights = th.softmax(scores.masked_fill(hidden.unsqueeze(1), -math.inf), dim=-1)
        attended = (weights @ values).transpose(1, 2).flatten(2)
        tokens = self.join_attention(tokens, self.out(attended))
        return self.join_ffn(tokens, self.ffn(tokens))

    def distances(self, n: int, device: th.device) -> th.Tensor:
        """
        :param n: Number of tokens
        :param device: Where to
        :return: By how much each of them is later than each of those with keys, shape ``(n, span + n)``
        """
        steps = th.arange(self.span + n, device=device)
        return steps[self.span :, None] - steps

    def _heads(self, x: th.Tensor) -> th.Tensor:
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)


class Stem(nn.Module):
    """
    Makes a token of the features of the last few steps.

    :param span: How many steps it looks back
    :param features_dim: Size of the features of one step
    :param d_model: Size of a token
    """

    def __init__(self, span: int, features_dim: int, d_model: int):
        super().__init__()
        self.span = span
        self.linear = nn.Linear((span + 1) * features_dim, d_model)
        nn.init.orthogonal_(self.linear.weight, gain=math.sqrt(2))
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: th.Tensor, episodes: th.Tensor) -> th.Tensor:
        """
        :param features: Shape ``(batch_size, span + n, features_dim)``
        :param episodes: A number for each, see :class:`Transformer`, shape ``(batch_size, span + n)``
        :return: Tokens, shape ``(batch_size, n, d_model)``; steps of other episodes count as zero
        """
        n = features.shape[1] - self.span
        now = episodes[:, self.span :]
        frames = []
        for first in range(self.span + 1):
            is_other = episodes[:, first : first + n] != now
            frames.append(features[:, first : first + n].masked_fill(is_other.unsqueeze(2), 0.0))
        return self.linear(th.cat(frames, dim=2))


class Cache:
    """
    What has been computed of the steps so far. It holds as long as the weights stay the same.

    :param transformer: For which it is
    :param n_sequences: How many
    :param capacity: Steps of each
    """

    def __init__(self, transformer: Transformer, n_sequences: int, capacity: int):
        weight = transformer.stem.linear.weight
        # Of the last steps that the stem still needs
        self.features = weight.new_zeros(n_sequences, transformer.stem.span, transformer.features_dim)
        self.episodes = weight.new_zeros(n_sequences, capacity, dtype=th.long)
        shape = (n_sequences, capacity, transformer.d_model)
        self.keys, self.values = ([weight.new_zeros(shape) for _ in transformer.blocks] for _ in range(2))
        self.length = 0


class Transformer(nn.Module):
    """
    Turns a sequence of features into what a policy with a memory knows at each step.

    A :class:`Stem` makes a token of each step and some before it, so that it knows about velocities from the start, and the
    blocks add to it what they find in earlier ones. The first of them finds tokens of single steps, for in tokens that overlap
    what was then is mixed with what was before and after. Each block looks back some steps, all together
    ``context_length - 1``. Nothing is computed of the first steps of a sequence, of which is not known what was before: a
    sequence becomes shorter, as by convolutions without padding.

    :param features_dim: Size of the features of one step
    :param context_length: Steps that it sees, the present one included, at least 1
    :param d_model: Size of a token, a multiple of ``n_heads``
    :param n_heads: Heads of the attention
    :param n_layers: Blocks, among which the steps to look back are shared out
    :param ffn_dim: Hidden size of the linear layers
    :param gate: Whether the blocks are gated
    :param n_stacked: Steps of which a token is made, if the first block looks back as far
    """

    def __init__(
        self,
        features_dim: int,
        context_length: int,
        d_model: int = 64,
        n_heads: int = 4,
        n_layers: int = 1,
        ffn_dim: int = 128,
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
        """The blocks."""
        return list(self.blocks)  # type: ignore[arg-type]

    @property
    def n_outputs(self) -> int:
        """How many numbers it knows at each step."""
        return 2 * self.d_model

    def forward(self, features: th.Tensor, episodes: th.Tensor, cache: Cache | None = None) -> th.Tensor:
        """
        :param features: Of successive steps, shape ``(n_sequences, context_length - 1 + n, features_dim)``
        :param episodes: A number for each, the same for two steps if one may see the other, shape
            ``(n_sequences, context_length - 1 + n)``
        :param cache: An empty one, to be filled with them
        :return: Of the last n steps, shape ``(n_sequences, n, n_outputs)``
        """
        first = self.layers[0].span - self.stem.span
        present = self.stem(features[:, first:], episodes[:, first:])
        tokens, start = self.single(features, episodes), 0
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
        return th.cat([present[:, start - self.layers[0].span :], tokens], dim=2)

    def step(self, features: th.Tensor, episodes: th.Tensor, cache: Cache) -> th.Tensor:
        """
        As :meth:`forward` for the step after those in the cache, to which it is added.

        :param features: Shape ``(n_sequences, features_dim)``
        :param episodes: Shape ``(n_sequences,)``
        :param cache: Of at least ``context_length - 1`` steps
        :return: Shape ``(n_sequences, n_outputs)``
        """
        now = cache.length
        cache.episodes[:, now] = episodes
        stacked = th.cat([cache.features, features.unsqueeze(1)], dim=1)
        cache.features = stacked[:, 1:]
        present = self.stem(stacked, cache.episodes[:, now - self.stem.span : now + 1])
        tokens = self.single(features.unsqueeze(1), cache.episodes[:, now : now + 1])
        for layer, block in enumerate(self.layers):
            cache.keys[layer][:, now : now + 1], cache.values[layer][:, now : now + 1] = block.keys_values(tokens)
            seen = slice(now - block.span, now + 1)
            visible = _same(cache.episodes[:, now : now + 1], cache.episodes[:, seen])
            queries = present if layer == 0 else tokens
            tokens = block(queries, cache.keys[layer][:, seen], cache.values[layer][:, seen], visible)
        cache.length += 1
        return th.cat([present, tokens], dim=2).squeeze(1)


def _same(ones: th.Tensor, others: th.Tensor) -> th.Tensor:
    """Which numbers are the same, shape ``(batch_size, n, m)`` for ``(batch_size, n)`` and ``(batch_size, m)``."""
    return ones.unsqueeze(2) == others.unsqueeze(1)
