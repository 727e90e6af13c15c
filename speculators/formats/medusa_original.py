"""Medusa in the layout of its authors (FasterDecoding/Medusa): a list of sequences, ``{head}.{place}.…``.

``{head}.{block}.linear.weight`` and ``.bias`` per residual block and ``{head}.{blocks}.weight`` for the output. Every
block has a bias (its linear layer has one), zero where ours has none, and every head an output, the same one written
again where ours share it: text-generation-inference asks for all of them.

The file has the name that it asks for, ``medusa_lm_head.safetensors``. vLLM takes any safetensors file of the folder,
reads these names too and, told ``original_lm_head``, keeps a shared output once; so one folder serves both. The
authors' own loader reads only pickles (``medusa_lm_head.pt``), which are not written here.

Linked heads, which no engine computes, are written for our own reader: ``{head}.link.weight`` beside the rest. Engines
would leave that tensor out without a word, so the configuration has none of the fields by which they know Medusa heads:
vLLM knows no such ``model_type``, and text-generation-inference looks for ``medusa_num_heads``.
"""

import re
from typing import Any

import torch
from torch import Tensor

from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.formats import medusa
from bitdraft.speculators.formats.facts import WRITTEN, TargetFacts
from bitdraft.speculators.formats.names import renamed
from bitdraft.speculators.medusa import MedusaConfig, MedusaHead

NAME = "medusa-original"
KIND = "medusa"
ENGINES = ("vLLM", "text-generation-inference")
WEIGHTS = "medusa_lm_head.safetensors"
LINKED_MODEL_TYPE = "bitdraft-linked-medusa"
_NAME = re.compile(r"(?:medusa_heads\.)?(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")
_LINK = re.compile(r"(\d+)\.link\.weight")


def is_this_format(config: dict[str, Any], names: set[str]) -> bool:
    del config  # published ones say no model_type
    return any(_NAME.fullmatch(name) for name in names)


def engines(head: MedusaHead) -> tuple[str, ...]:
    """All, or none where heads are linked."""
    return () if head.config.link else ENGINES


def check(head: MedusaHead) -> None:
    """Holds whatever Medusa heads can be."""
    del head


def tensors(head: MedusaHead) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, in bf16."""
    out: dict[str, Tensor] = {}
    for name, weight in head.state_dict().items():
        group, i, *rest = name.split(".")
        if group == "links":
            out[f"{i}.link.weight"] = weight.detach().to(WRITTEN)
        elif group == "blocks":
            out[f"{i}.{rest[1]}.linear.{rest[2]}"] = weight.detach().to(WRITTEN)
        else:
            out[f"{i}.{head.config.blocks}.weight"] = weight.detach().to(WRITTEN)
    shared = None if head.config.own_output else medusa.shared_output(head)
    for place in range(head.config.heads):
        if not head.config.bias:
            for block in range(head.config.blocks):
                out[f"{place}.{block}.linear.bias"] = torch.zeros(head.target_hidden_size, dtype=WRITTEN)
        if shared is not None:  # safetensors stores no tensor under two names
            out[f"{place}.{head.config.blocks}.weight"] = shared.clone()
    return out


def shapes(head: MedusaHead) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all tensors."""
    blocks = medusa.block_shapes(head, bias=True)
    outputs = [f"{i}.{head.config.blocks}.weight" for i in range(head.config.heads)]
    width = head.target_hidden_size
    return {
        **{f"{i}.{j}.linear.{leaf}": shape for (i, j, leaf), shape in blocks.items()},
        **dict.fromkeys(outputs, (head.vocab.target_size, width)),
        **{f"{i}.link.weight": (width, (i + 1) * width) for i in range(len(head.links))},
    }


def config(head: MedusaHead, target: TargetFacts, draft_length: int) -> dict[str, Any]:
    """``config.json`` of the checkpoint."""
    del draft_length  # all heads draft unless the engine is told otherwise
    chosen, known = head.config, dict[str, Any]()
    ours: dict[str, Any] = {"own_output": chosen.own_output, "bias": chosen.bias}
    if chosen.link:
        known = {"model_type": LINKED_MODEL_TYPE, "architectures": ["LinkedMedusa"]}
        ours |= {"link": True, "blocks": chosen.blocks}
    else:
        known = {"medusa_num_heads": chosen.heads, "medusa_num_layers": chosen.blocks, "medusa_fc_bias": True}
    return {**medusa.settings(head, target), **known, "bitdraft_head": ours}


def load(config: dict[str, Any], weights: dict[str, Tensor], target: LowBitTarget) -> DraftHead:
    """The heads of a checkpoint, with or without ``medusa_heads.`` before every name.

    As many heads as the file holds, which published configurations do not always say. Heads without any output share
    the target's; told ``original_lm_head`` they share the one that is stored, as vLLM does. Raises ``ValueError`` for
    stored outputs that differ all the same, for fewer heads than config.json claims, and for settings or tensors that
    they cannot represent.
    """
    ours = config.get("bitdraft_head") or {}
    link = bool(ours.get("link"))
    blocks = ours["blocks"] if link else config["medusa_num_layers"]
    own, count = _own_names(weights, blocks)
    if count < config.get("medusa_num_heads", count):
        raise ValueError(f"config.json sets medusa_num_heads to {config['medusa_num_heads']} but {count} are stored")
    outputs = [name for name in own if name.startswith("lm_heads.")]
    shared = not outputs or ours.get("own_output") is False or bool(config.get("original_lm_head"))
    if shared and outputs:
        stored = [own.pop(name) for name in outputs]
        if not all(torch.equal(stored[0], other) for other in stored[1:]):
            raise ValueError(
                "config.json says that the heads share their output (original_lm_head), but their stored outputs differ"
            )
        own["lm_head.weight"] = stored[0]
    bias = ours.get("bias", True)
    if not bias:
        biases = [own.pop(name) for name in list(own) if name.startswith("blocks.") and name.endswith(".bias")]
        if any(bool(b.any()) for b in biases):
            raise ValueError("config.json says that the blocks have no bias, but a stored bias is not zero")
    shape = MedusaConfig(heads=count, blocks=blocks, own_output=not shared, bias=bias, link=link)
    return medusa.build(shape, config, own, target)


def _own_names(weights: dict[str, Tensor], blocks: int) -> tuple[dict[str, Tensor], int]:
    """The tensors under the heads' own names, and how many heads there are; ``ValueError`` for any other name."""

    def own(name: str) -> str:
        if linked := _LINK.fullmatch(name):
            return f"links.{linked[1]}.weight"
        found = _NAME.fullmatch(name)
        if found is None:
            raise ValueError(f"tensor {name} is none of a Medusa head's")
        i, place, leaf = int(found[1]), int(found[2]), found[3]
        return f"blocks.{i}.layers.{place}.{leaf}" if place < blocks else f"lm_heads.{i}.{leaf}"

    named = renamed(weights, own)
    return named, 1 + max(int(name.split(".")[1]) for name in named)
