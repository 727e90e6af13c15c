"""The head that a run begins with: a fresh one, or one that goes on learning; and which of its weights learn."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer

from bitdraft.data.calibration import calibration_text
from bitdraft.data.chat import Example, end_of_turn_ids
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.profiles import profile_named
from bitdraft.quant.target import LowBitTarget, calibration_ids, can_compile
from bitdraft.speculators.base import DraftHead, check_layers
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.load import load_head
from bitdraft.speculators.low_bit import low_bit_layers, quantize_head
from bitdraft.speculators.qat import train_in_low_bit
from bitdraft.speculators.registry import HEADS
from bitdraft.speculators.vocab import DraftVocab, default_draft_size
from bitdraft.train.config import RunConfig


def check_head_settings(config: RunConfig, target: LowBitTarget) -> None:
    """Refuse what can never fit this target before the answers are written."""
    if config.draft_quant and config.optim.compile:
        raise ValueError("optim.compile is for heads in 16 bit: leave it out with draft_quant")
    if config.optim.compile and not can_compile():
        raise ValueError("--optim.compile needs a C++ compiler (g++ or clang++) on the PATH: leave it out")
    settings = getattr(config, config.head)
    if isinstance(settings, Eagle3Config) and config.init_from is not None:
        for name in ("output_rank", "train_embedding"):
            if getattr(settings, name):
                raise ValueError(f"eagle3.{name} is of fresh heads: leave it out, or init_from")
    elif isinstance(settings, Eagle3Config):
        check_layers(settings.capture_layers or (), target)
        if (settings.output_rank or 0) > target.hidden_size:
            raise ValueError(
                f"eagle3.output_rank {settings.output_rank} exceeds the target's hidden size of {target.hidden_size}: "
                "lower it"
            )
        size = settings.draft_vocab_size or 0
        if size > target.vocab_size:
            raise ValueError(
                f"eagle3.draft_vocab_size {size} exceeds the target's vocabulary of {target.vocab_size}: lower it"
            )


def make_head(
    config: RunConfig, target: LowBitTarget, tokenizer: Any, examples: Sequence[Example], say: Callable[[str], object]
) -> DraftHead:
    """The run's head in fp32 on the target's device, with ``requires_grad`` on what is trained."""
    written = [torch.tensor(e.answer, dtype=torch.int64) for e in examples]
    head = _fresh(config, target, tokenizer, written) if config.init_from is None else _read(config, target)
    if not head.vocab.is_full:
        share = f"{len(head.vocab):,} of {target.vocab_size:,} tokens"
        say(f"draft vocabulary: {share}, {head.vocab.coverage(written):.2%} of the answers")
    head.float().to(target.device)
    torch.manual_seed(config.seed)  # the same adapters whatever ran before
    _choose_trained(head, config)
    if config.draft_quant:
        recipe = load_recipe(config.draft_quant)
        text = calibration_text(config.calibration, recipe, tokenizer) or calibration_ids(tokenizer)
        train_in_low_bit(head, recipe, target=target, calibration=text, profile=profile_named(config.target_profile))
        say(f"the head is trained in {recipe.name}")
    head.recompute, head.compiled = config.optim.checkpointing, config.optim.compile
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    say(f"{head.kind} head: {trained / 1e6:.1f} M trained parameters, captured layers {list(head.capture_layers)}")
    return head


def _fresh(config: RunConfig, target: LowBitTarget, tokenizer: Any, written: list[torch.Tensor]) -> DraftHead:
    vocab = DraftVocab.full(target.vocab_size)
    settings = getattr(config, config.head)
    if isinstance(settings, Eagle3Config):
        size = settings.draft_vocab_size or default_draft_size(target.vocab_size)
        special = {*tokenizer.all_special_ids, *end_of_turn_ids(target.model, tokenizer)}
        vocab = DraftVocab.most_frequent(written, size, target.vocab_size, special)
    torch.manual_seed(config.seed)  # the same fresh weights whatever ran before
    return HEADS[config.head].from_target(settings, target, vocab)


def _read(config: RunConfig, target: LowBitTarget) -> DraftHead:
    """The head in ``config.init_from``: its own shape and vocabulary, the run's settings of training."""
    assert config.init_from is not None
    head = load_head(config.init_from, target)
    if head.kind != config.head:
        raise ValueError(f"init_from: {config.init_from} holds a head of kind {head.kind}: say --head {head.kind}")
    if low_bit_layers(head):
        raise ValueError(
            f"init_from: the head in {config.init_from} is in low bit, and training needs its masters: give the 16-bit "
            "head that it was made of"
        )
    if isinstance(head, Eagle3Head):
        head.unfold(target)
        head.config = replace(head.config, steps=config.eagle3.steps, start="random")  # its weights are its start
    return head


def _choose_trained(head: DraftHead, config: RunConfig) -> None:
    frozen = set()
    if isinstance(head, Eagle3Head):
        if not (config.eagle3.train_output or config.eagle3.output_rank):
            frozen.add("lm_head.")
        if not config.eagle3.train_embedding:
            frozen.add("embed_tokens.")
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)))
    if config.tune == "norms-fc":
        if not isinstance(head, Eagle3Head):
            raise ValueError(f"tune is norms-fc, but a {head.kind} head has neither norms nor fc: take all or lora")
        for name, parameter in head.named_parameters():
            parameter.requires_grad_("norm" in name or name.startswith("fc."))
    if config.tune == "lora":
        _add_adapters(head, config.tune_rank)


def _add_adapters(head: DraftHead, rank: int) -> None:
    """LoRA adapters (Hu et al. 2021, arXiv:2106.09685) on the linear layers that would be trained, and nothing else."""
    names = [
        name
        for name, module in head.named_modules()
        if isinstance(module, torch.nn.Linear) and module.weight.requires_grad and not name.startswith("lm_head")
    ]  # of output heads the loss reads the weight, past any adapter
    head.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names), head)


@torch.no_grad()
def as_served(head: DraftHead, config: RunConfig) -> DraftHead:
    """The trained head as it is served, in place: adapters merged, in low bit if it was trained so."""
    merge_adapters(head)
    if config.draft_quant:
        quantize_head(head, load_recipe(config.draft_quant), profile=profile_named(config.target_profile))
    return head


def merge_adapters(head: DraftHead) -> DraftHead:
    """Add what adapters learned to the weights they adapt, in place; nothing where there are none."""
    adapted = [(name, m) for name, m in head.named_modules() if isinstance(m, BaseTunerLayer)]
    for name, module in adapted:
        module.merge()
        head.set_submodule(name, module.get_base_layer())
    return head
