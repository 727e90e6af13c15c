"""A least-squares start for an EAGLE-3 head.

A fresh head has to find out two things that are linear to first order: how the target's states at position ``t``
map to its final state at ``t + 1``, and what the token in between adds. Both are fitted in closed form by ridge
regression before the first step:

    h_{t+1} / gain  ≈  A [captured states of t]  +  B RMS(e_{t+1})

``A`` becomes ``fc``. ``B``, cut to the rank that the values have, becomes ``v_proj`` and ``o_proj``, and
queries and keys of the embedding half start equal, so that a row attends mostly to itself and the values pass
through. Where a norm stands between ``fc`` and the sum, its gain is the size that the fit gave the state; where one
stands between projections and scores, its gain is what gives the self-score.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.eagle3_layer import DecoderLayer, LayerShape, Norm

RIDGE = 1e-3  # of the mean diagonal
SELF_SCORE = 5.6  # attention logit of a row with itself: e^5.6 outweighs a few hundred other rows
SMALL = 0.1  # of the usual size: what should matter little at first


@torch.no_grad()
def least_squares_start(
    fc: nn.Linear,
    layer: DecoderLayer,
    norm: Norm,
    shape: LayerShape,
    fc_inputs: Callable[[Tensor], Tensor],
    embedding: Tensor,
    batches: Iterable[tuple[TargetStates, Tensor, Tensor]],
) -> None:
    """Set ``fc`` and the layer's attention from data; ``norm`` is the head's last, ``fc_inputs`` makes ``[N, A·H]`` of
    captured states ``[N, A, H]``.

    ``batches``: packed target states, tokens ``[N]`` and the mask ``[N]`` of supervised positions. Needs one
    ``[(A+1)H, (A+1)H]`` system in fp64. Raises ``ValueError`` for a head of another hidden size than the target's,
    whose states are no fit of the target's.
    """
    width = shape.hidden_size
    if width != shape.target_hidden_size:
        raise ValueError(
            f"eagle3.start is least-squares, but the head's hidden size of {width} is not the target's "
            f"{shape.target_hidden_size}: set eagle3.start to random"
        )
    inputs = fc.in_features + width
    gram = torch.zeros(inputs, inputs, dtype=torch.float64, device=fc.weight.device)
    cross = torch.zeros(inputs, width, dtype=torch.float64, device=gram.device)
    dead = norm.weight.abs() < 1e-3 * norm.weight.abs().mean()  # channels that the final norm shuts off
    gain_inverse = torch.where(dead, 0.0, 1.0 / norm.weight)
    rows = 0
    for states, tokens, supervised in batches:
        position = supervised.nonzero()[:, 0]
        captured = fc_inputs(states.captured[position - 1].float())  # [N, A·H] at t
        token = layer.input_layernorm(embedding[tokens[position]].float())  # [N, H] of t + 1
        x = torch.cat([captured, token], dim=1)
        y = states.last_hidden[position].float() * gain_inverse  # [N, H] at t + 1
        gram += (x.T @ x).double()
        cross += (x.T @ y).double()
        rows += len(x)
    ridge = RIDGE * gram.diagonal().mean()
    gram += ridge * torch.eye(inputs, dtype=gram.dtype, device=gram.device)
    solution = torch.linalg.solve(gram, cross).T  # [H, (A+1)H]
    states_part, token_part = solution[:, :-width], solution[:, -width:].float()
    fc.weight.copy_(states_part)
    if layer.norm_before_residual:
        squares = ((states_part @ gram[:-width, :-width]) * states_part).sum() - ridge * states_part.square().sum()
        layer.hidden_norm.weight.fill_(float((squares / (rows * width)).sqrt()))
    for name, parameter in layer.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
    _attend_to_oneself(layer, shape)
    _values_from(token_part, layer, shape)
    layer.mlp.down_proj.weight.mul_(SMALL)


def _attend_to_oneself(layer: DecoderLayer, shape: LayerShape) -> None:
    """Equal queries and keys of the embedding half: a row's score with itself stands out among unlike tokens."""
    attention, width = layer.self_attn, shape.hidden_size
    groups = shape.num_attention_heads // shape.num_key_value_heads
    sigma = (SELF_SCORE / (shape.head_dim**0.5 * width)) ** 0.5
    keys = torch.randn_like(attention.k_proj.weight[:, :width]) * sigma  # [N_kv D, H]
    queries = keys.unflatten(0, (-1, shape.head_dim)).repeat_interleave(groups, dim=0).flatten(0, 1)  # [N D, H]
    for projection, weight in ((attention.q_proj, queries), (attention.k_proj, keys)):
        projection.weight[:, :width] = weight
        projection.weight[:, width:] *= SMALL
    if shape.qk_norm:  # normed queries and keys have length √D, whatever the projections are
        for normed in (attention.q_norm, attention.k_norm):
            assert isinstance(normed, Norm)
            normed.weight.fill_((SELF_SCORE / shape.head_dim**0.5) ** 0.5)


def _values_from(token_part: Tensor, layer: DecoderLayer, shape: LayerShape) -> None:
    """Factor ``[H, H]`` through the values: ``o_proj · (heads repeated) · v_proj ≈ token_part``."""
    attention, width = layer.self_attn, shape.hidden_size
    groups = shape.num_attention_heads // shape.num_key_value_heads
    left, singular, right = torch.linalg.svd(token_part, full_matrices=False)
    rank = min(shape.num_key_value_heads * shape.head_dim, width)
    root = singular[:rank].sqrt()
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:rank, :width] = root[:, None] * right[:rank]
    into = torch.zeros(width, shape.num_key_value_heads * shape.head_dim, device=left.device)
    into[:, :rank] = left[:, :rank] * root / groups  # every value is read by `groups` query heads
    repeated = into.unflatten(1, (-1, shape.head_dim)).repeat_interleave(groups, dim=1).flatten(1)  # [H, N D]
    attention.o_proj.weight.copy_(repeated)


def capture_scale(target: LowBitTarget, layers: tuple[int, ...]) -> Tensor:
    """``2^-round(log2 rms)`` of each captured layer, from seeded random tokens behind the outsized first ones.

    Residual streams differ tenfold in size between layers and models. Without this the fused state drowns what the
    draft layer adds to it, and the head hardly learns.
    """
    ids = torch.randint(0, target.vocab_size, (1, 128), generator=torch.Generator().manual_seed(0))
    captured = target.states(ids.to(target.device), capture=layers).captured[0, 8:].float()  # [T, A, H]
    size = captured.pow(2).mean(-1).sqrt().median(dim=0).values  # [A]
    return torch.exp2(-size.clamp(min=1e-6).log2().round())
