"""Linear attention whose decay is constant: exact over trees of drafts, without a copy of any state.

Per head, with a decay rate γ ≥ 0 that no token changes (Lightning Attention, RetNet, Simple GLA):

    S_t = e^-γ S_{t-1} + k_tᵀ v_t,    o_t = d^-½ q_t S_t.

Unrolled over a tree whose node i stands δ_i steps behind the state S_0, its root one step, and descends from A(i):

    o_i = d^-½ [ e^{-γ δ_i} q_i S_0 + Σ_{j ∈ A(i) ∪ {i}} e^{-γ (δ_i - δ_j)} (q_i · k_j) v_j ].

This is tree attention whose mask holds decays instead of ones. A pass keeps its keys and values, ``nodes · d``, where
a state per node would be ``nodes · d²``; the ``a`` nodes that verification accepts are replayed into the state after
it:

    S ← e^{-γ a} S_0 + Σ_{j accepted} e^{-γ (a - δ_j)} k_jᵀ v_j.

No exponent is ever positive, so no decay overflows. States are fp32 (fp64 for fp64 models), as engines keep them.

**How a model hands over its layers.** The attention module has the class attribute ``state_store =
ConstantDecayState``, computes queries and keys (norm and rotation done, by ``position_ids``, which count a tree's
depth) and values, and calls ``attend(q, k, v, decay, cache, layer_idx)`` in place of its kernel; what follows (norm,
gate, output product) stays its own. Code that came with a checkpoint (MiniCPM-SALA's lightning layers, read with
``trust_remote_code``) does not know of this: give each such module a ``state_store`` and such a ``forward`` after
``load_target``. Their ``decay`` is ``2^{-8 (h + 1) / heads}``, ALiBi's slopes; kernels of fla call its negative
``g_gamma``. Queries of a model that does not scale by ``d^-½`` (MiniMax) come in multiplied by ``d^½``. The model
around the modules must take ``position_ids``, a mask ``[B, 1, T, S]`` and ``cache`` as models of transformers 5 do.
"""

from typing import Any

import torch
from torch import Tensor

from bitdraft.quant.recurrent.state_store import Nodes

# B sequence, H head, N node or token, L step of a path, d width of keys, e width of values.

CHUNK = 64
"""Tokens of a text that meet in one product: more cost work between tokens, fewer cost work on the state."""


def attend(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, cache: Any | None, layer: int) -> Tensor:
    """The attention of layer number ``layer`` in the running pass, ``[B, H, N, e]`` in the queries' dtype.

    ``q``, ``k``: ``[B, H, N, d]``; ``v``: ``[B, H, N, e]``; ``decay``: ``[H]`` rates, in fp32 also where the model is
    not. ``cache``: the one that the target made, or ``None`` for texts from their beginning. Raises ``ValueError`` for
    another cache and for a negative rate.
    """
    if cache is None:
        return chunked_outputs(q, k, v, empty_state(k, v, decay), decay)[0].to(q.dtype)
    store = cache.layers[layer] if layer < len(cache.layers) else None
    if not isinstance(store, ConstantDecayState):
        raise ValueError(
            f"layer {layer} is linear attention of constant decay, which a {type(cache).__name__} does not remember: "
            "decode with the cache of LowBitTarget.new_cache, under a recipe without a KV format"
        )
    return store.attend(q, k, v, decay).to(q.dtype)


class ConstantDecayState:
    """One layer's states, ``[B, H, d, e]``, and the keys and values of a pass until its accepted nodes are known."""

    def __init__(self) -> None:
        self.nodes: Nodes | None = None  # of the running pass
        self.state: Tensor | None = None  # [B, H, d, e] behind all tokens that stay
        self.drafted: tuple[Tensor, Tensor, Tensor] | None = None  # k [B, H, N, d], v [B, H, N, e], decay [H]

    def begin(self, nodes: Nodes) -> None:
        """Start a pass."""
        assert self.drafted is None, "the pass before was not committed"
        self.nodes = nodes

    def attend(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        """As the function ``attend``, in the state's dtype."""
        assert self.nodes is not None
        state = empty_state(k, v, decay) if self.state is None else self.state
        if self.nodes.stays:
            outputs, self.state = chunked_outputs(q, k, v, state, decay)
            return outputs
        self.state, self.drafted = state, (k, v, decay)
        return tree_outputs(q, k, v, state, decay, self.nodes.depth, self.nodes.lineage)

    def commit(self, path: Tensor, kept: Tensor) -> None:
        """Replay the accepted nodes; nothing else of the pass is left."""
        assert self.state is not None and self.drafted is not None
        k, v, decay = self.drafted
        self.state, self.drafted = advanced_state(k, v, self.state, decay, path, kept), None

    def keep_rows(self, rows: Tensor) -> None:
        """Remember these rows ``[B']`` alone, in this order."""
        if self.state is not None:
            self.state = self.state[rows]

    def join(self, other: "ConstantDecayState") -> None:
        """Append the rows of ``other``, which is used up."""
        assert self.state is not None and other.state is not None
        self.state, other.state = torch.cat([self.state, other.state]), None


def empty_state(k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """``[B, H, d, e]`` zeros for keys ``[B, H, N, d]`` and values ``[B, H, N, e]``, in fp32 or more.

    Raises ``ValueError`` for a negative rate in ``decay`` ``[H]``, under which a state would grow without bound.
    """
    if bool((decay < 0).any()):
        raise ValueError(
            f"a constant decay is a rate, at least 0, got {float(decay.min()):.4g}: give γ where a token decays to e^-γ"
        )
    dtype = torch.promote_types(k.dtype, torch.float32)
    return k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=dtype)


def tree_outputs(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor, depth: Tensor, lineage: Tensor
) -> Tensor:
    """What every node of a tree reads, ``[B, H, N, e]`` in the state's dtype.

    ``q``, ``k``: ``[B, H, N, d]``; ``v``: ``[B, H, N, e]``; ``state``: ``[B, H, d, e]`` before the root; ``decay``:
    ``[H]`` rates; ``depth``: ``[B, N]`` int64, 0 at the root; ``lineage``: ``[B, N, N]`` bool, whether node ``j`` is
    node ``i`` or one that it descends from.
    """
    q, k, v = (x.to(state.dtype) for x in (q, k, v))
    rate = decay.to(state.dtype)[:, None]  # [H, 1]
    of_past = torch.exp(-rate * (depth[:, None] + 1))  # [B, H, N]
    # Gaps to nodes outside the lineage may be negative, and their exponentials infinite: 0 · ∞ is not 0.
    gaps = (depth[:, :, None] - depth[:, None, :]).clamp(min=0)[:, None]  # [B, 1, N, N]
    of_nodes = torch.exp(-rate[..., None] * gaps) * lineage[:, None]  # [B, H, N, N]
    read = of_past[..., None] * (q @ state) + (of_nodes * (q @ k.mT)) @ v
    return read * q.shape[-1] ** -0.5


def advanced_state(k: Tensor, v: Tensor, state: Tensor, decay: Tensor, path: Tensor, kept: Tensor) -> Tensor:
    """The state behind the first ``kept`` ``[B]`` nodes of ``path`` ``[B, L]``, ``[B, H, d, e]``.

    ``k``, ``v``, ``state`` and ``decay`` as in ``tree_outputs``. A row that keeps no node keeps its state bit for bit.
    """
    k, v = (torch.take_along_dim(x, path[:, None, :, None], dim=2).to(state.dtype) for x in (k, v))  # [B, H, L, …]
    rate = decay.to(state.dtype)[:, None]  # [H, 1]
    behind = kept[:, None] - 1 - torch.arange(path.shape[1], device=path.device)  # [B, L] kept nodes behind each one
    weights = torch.exp(-rate * behind.clamp(min=0)[:, None]) * (behind >= 0)[:, None]  # [B, H, L]
    of_past = torch.exp(-rate * kept[:, None, None])[..., None]  # [B, H, 1, 1]
    return of_past * state + (k * weights[..., None]).mT @ v


def chunked_outputs(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """What every token of a text reads, ``[B, H, T, e]``, and the state behind it, ``chunk`` tokens at a time.

    ``q``, ``k``, ``v``, ``state`` and ``decay`` as in ``tree_outputs``, each token following the one before.
    """
    outputs = []
    for queries, keys, values in zip(*(x.split(chunk, dim=2) for x in (q, k, v)), strict=True):
        tokens = torch.arange(queries.shape[2], device=q.device).expand(len(q), -1)  # [B, N]
        lineage = tokens[:, :, None] >= tokens[:, None, :]
        outputs.append(tree_outputs(queries, keys, values, state, decay, tokens, lineage))
        state = advanced_state(keys, values, state, decay, tokens, tokens[:, -1] + 1)
    return torch.cat(outputs, dim=2), state
