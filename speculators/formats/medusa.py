"""What the two Medusa layouts share: heads from tensors under their own names, and their settings."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.formats.facts import DTYPE, WRITTEN, TargetFacts
from bitdraft.speculators.low_bit import restore_low_bit
from bitdraft.speculators.medusa import MedusaConfig, MedusaHead
from bitdraft.speculators.vocab import DraftVocab


def settings(head: MedusaHead, target: TargetFacts) -> dict[str, Any]:
    """What vLLM reads of either layout. No key may hold "num" with "heads" or "layers" but those that say how many
    there are: vLLM's reader takes each of them for that."""
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": head.target_hidden_size,
        "vocab_size": head.vocab.target_size,
        "original_lm_head": not head.config.own_output,
        "max_paths": 64,
        "topk": 10,
        "logit_scale": 1.0,
        "dtype": DTYPE,
        "base_model_name_or_path": target.name,
    }


def block_shapes(head: MedusaHead, *, bias: bool) -> dict[tuple[int, int, str], tuple[int, ...]]:
    """By head, block and ``weight`` or ``bias``."""
    width = head.target_hidden_size
    leaves: dict[str, tuple[int, ...]] = {"weight": (width, width), **({"bias": (width,)} if bias else {})}
    return {
        (i, j, leaf): shape
        for i in range(head.config.heads)
        for j in range(head.config.blocks)
        for leaf, shape in leaves.items()
    }


def build(
    shape: MedusaConfig,
    config: Mapping[str, Any],
    weights: dict[str, Tensor],
    target: LowBitTarget,
) -> MedusaHead:
    """Heads from ``weights`` under their own names (``blocks.{head}.layers.{block}``, ``links.{head}``,
    ``lm_heads.{head}``, or ``lm_head.weight`` for the shared output, by default the target's).

    Raises ``ValueError`` for a target of another shape and for settings that cannot be computed; ``RuntimeError`` as
    ``load_state_dict`` does.
    """
    first = weights.get("blocks.0.layers.0.weight")
    width = config.get("hidden_size") or (target.hidden_size if first is None else first.shape[-1])
    outputs = [t.shape[0] for name, t in weights.items() if name.startswith(("lm_head.", "lm_heads."))]
    tokens = config.get("vocab_size") or (outputs[0] if outputs else target.vocab_size)
    if (width, tokens) != (target.hidden_size, target.vocab_size):
        raise ValueError(
            f"the heads were trained for a target with hidden size {width} and vocabulary {tokens}, but {target.name} "
            f"has {target.hidden_size} and {target.vocab_size}: give the target that they were trained for"
        )
    if config.get("truncated_vocab_size") not in (None, tokens) or "token_map" in weights:
        raise ValueError("config.json sets truncated_vocab_size: Medusa heads with a reduced vocabulary are not read")
    if config.get("logit_scale") not in (None, 1.0):
        raise ValueError(f"config.json sets logit_scale to {config['logit_scale']}, which cannot be computed here")
    borrowed = None
    if not shape.own_output:
        borrowed = weights.pop("lm_head.weight", target.output_weight.detach()).to(target.device, target.dtype)
    vocab, read = DraftVocab.full(target.vocab_size), target.embedding.weight.detach()
    head = MedusaHead(shape, target.hidden_size, vocab, borrowed, read if shape.link else None)
    restore_low_bit(head, config, weights)
    head.load_state_dict(weights)
    return head


def shared_output(head: MedusaHead) -> Tensor:
    """``[V, H]``: the projection of heads that have none of their own."""
    return head.output_weight.detach().to(WRITTEN)
