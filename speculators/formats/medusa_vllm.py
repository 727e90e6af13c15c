"""Medusa in the layout that vLLM reads (``model_type: medusa``).

Always the full vocabulary: vLLM cannot load a truncated one. No key may hold both "num" and "heads" but ``num_heads``
itself: vLLM's config reader renames every other to it.
"""

from typing import Any

import torch
from torch import Tensor

from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.medusa import MedusaConfig, MedusaHead
from bitdraft.speculators.vocab import DraftVocab

MODEL_TYPE = "medusa"


def is_this_format(config: dict[str, Any]) -> bool:
    return config.get("model_type") == MODEL_TYPE


def tensors(head: MedusaHead) -> dict[str, Tensor]:
    """``blocks.{head}.layers.{block}.weight`` and ``lm_head.weight`` (shared) or ``lm_heads.{head}.weight``; bf16."""
    out = {name: weight.detach().to(torch.bfloat16) for name, weight in head.state_dict().items()}
    if not head.config.own_output:
        out["lm_head.weight"] = head.output_weight.detach().to(torch.bfloat16)
    return out


def config(head: MedusaHead, target: LowBitTarget, draft_length: int) -> dict[str, Any]:
    """``config.json`` of the checkpoint."""
    del draft_length  # vLLM drafts with all heads unless told otherwise
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["MedusaModel"],
        "hidden_size": head.target_hidden_size,
        "vocab_size": head.vocab.target_size,
        "num_heads": head.config.heads,
        "num_hidden_layers": head.config.blocks,
        "medusa_fc_bias": False,
        "original_lm_head": not head.config.own_output,
        "max_paths": 64,
        "topk": 10,
        "dtype": "bfloat16",
        "base_model_name_or_path": target.name,
    }


def load(config: dict[str, Any], weights: dict[str, Tensor], target: LowBitTarget) -> DraftHead:
    """The heads of a checkpoint."""
    if (config["hidden_size"], config["vocab_size"]) != (target.hidden_size, target.vocab_size):
        raise ValueError(
            f"the heads were trained for a target with hidden size {config['hidden_size']} and vocabulary "
            f"{config['vocab_size']}, but {target.name} has {target.hidden_size} and {target.vocab_size}: "
            "give the target that they were trained for"
        )
    if config.get("medusa_fc_bias"):
        raise ValueError("config.json sets medusa_fc_bias, which this version cannot compute")
    shared = bool(config.get("original_lm_head"))
    shape = MedusaConfig(heads=config["num_heads"], blocks=config["num_hidden_layers"], own_output=not shared)
    borrowed = weights.pop("lm_head.weight", None)
    if shared and borrowed is None:
        raise ValueError("config.json says original_lm_head but lm_head.weight is missing")
    if borrowed is not None:
        borrowed = borrowed.to(target.device, target.dtype)
    head = MedusaHead(shape, target.hidden_size, DraftVocab.full(target.vocab_size), borrowed)
    head.load_state_dict(weights)
    return head
