"""Queries, keys and values of EAGLE-3's training steps, all of which read ``[RMS(e); RMS(g)]``.

A token's embedding ``e`` is the same at every draft step, at another row, so its half of ``W [e; g] = W_e e + W_g g``
is computed once for each token. Layers that are no plain products of fp32 or fp64, or that somebody listens to, get
the whole input, step by step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bitdraft.speculators.eagle3_layer import DecoderLayer, unbatched
from bitdraft.speculators.products import Linear, product

# N packed token, R drafting row, H hidden; Q and S: of all heads of queries, and of keys or values, together.


class Step(NamedTuple):
    """What attention and the rest of the layer read in one draft step."""

    normed: Tensor  # [R, H] the normed state
    q: Tensor  # [R, heads, D]
    key: Tensor  # [N, key heads, D] in the first step, then [R, …]
    value: Tensor


class WholeInputs:
    """Steps of any layer."""

    def __init__(self, layer: DecoderLayer, embedded: Tensor) -> None:
        """``embedded`` ``[N, H]``: of the token behind each row."""
        self.layer, self.tokens = layer, layer.input_layernorm(embedded.to(layer.input_layernorm.weight.dtype))

    def first(self, g: Tensor, rows: Tensor, positions: Tensor) -> Step:
        """Keys and values of all rows, whose states are ``g`` ``[N, H]``; queries of ``rows`` ``[R]``."""
        u = torch.cat([self.tokens, self.layer.hidden_norm(g)], -1)  # [N, 2H]
        key, value = self.layer.keys_values(u[None], positions[None])
        return self._step(u[rows], positions[rows], key, value)

    def later(self, g: Tensor, ahead: Tensor, positions: Tensor) -> Step:
        """All of the drafting rows, whose states are ``g`` ``[R, H]`` and whose next tokens are those of the rows
        ``ahead`` ``[R]``."""
        u = torch.cat([self.tokens.index_select(0, ahead), self.layer.hidden_norm(g)], -1)  # [R, 2H]
        return self._step(u, positions, *self.layer.keys_values(u[None], positions[None]))

    def _step(self, u: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> Step:
        q = self.layer.queries(u[None], positions[None])
        return Step(u[:, self.layer.width :], unbatched(q), unbatched(key), unbatched(value))


class HalvedInputs:
    """The same, from products of the halves: queries and keys, which are rotated, in one, and values in another."""

    def __init__(self, layer: DecoderLayer, embedded: Tensor) -> None:
        tokens = layer.input_layernorm(embedded.to(layer.input_layernorm.weight.dtype))  # [N, H]
        attention, self.layer = layer.self_attn, layer
        q, k, v = (p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        self.queries = len(q)
        self.qk = torch.cat([q[:, layer.width :], k[:, layer.width :]])  # [Q + S, H]
        self.v = v[:, layer.width :].contiguous()  # [S, H]
        qk_bias = None if attention.q_proj.bias is None else torch.cat([attention.q_proj.bias, attention.k_proj.bias])
        self.tokens_qk = product(tokens, torch.cat([q[:, : layer.width], k[:, : layer.width]]), qk_bias)  # [N, Q + S]
        self.tokens_v = product(tokens, v[:, : layer.width].contiguous(), attention.v_proj.bias)  # [N, S]

    def first(self, g: Tensor, rows: Tensor, positions: Tensor) -> Step:
        normed, split = self.layer.hidden_norm(g), self.queries
        keys = product(normed, self.qk[split:]) + self.tokens_qk[:, split:]
        value = product(normed, self.v) + self.tokens_v
        normed = normed.index_select(0, rows)
        queries = product(normed, self.qk[:split]) + self.tokens_qk[:, :split].index_select(0, rows)
        q, _ = self.layer.rotated_heads(queries, positions[rows], split)
        _, key = self.layer.rotated_heads(keys, positions, 0)
        return Step(normed, q, key, self.layer.by_head(value))

    def later(self, g: Tensor, ahead: Tensor, positions: Tensor) -> Step:
        normed = self.layer.hidden_norm(g)
        qk = product(normed, self.qk) + self.tokens_qk.index_select(0, ahead)
        value = product(normed, self.v) + self.tokens_v.index_select(0, ahead)
        q, key = self.layer.rotated_heads(qk, positions, self.queries)
        return Step(normed, q, key, self.layer.by_head(value))


def training_inputs(layer: DecoderLayer, embedded: Tensor) -> WholeInputs | HalvedInputs:
    """``embedded`` ``[N, H]``: of the token behind each row."""
    attention = layer.self_attn
    plain = all(
        type(p) is Linear
        and p.weight.dtype in (torch.float32, torch.float64)
        and not (p._forward_pre_hooks or p._forward_hooks)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if plain and not torch.is_autocast_enabled(embedded.device.type):  # which would round each half
        return HalvedInputs(layer, embedded)
    return WholeInputs(layer, embedded)
