"""A frozen language model as it is served: loaded by transformers, computed in low bit.

Captured layers are numbered as vLLM numbers them: id ``k`` is the residual stream after ``k`` decoder
layers, the *input* of layer ``k``, which transformers calls ``hidden_states[k]``. The last hidden state is
taken after the final norm; logits come from it through the model's own output head, only where asked.
"""

import inspect
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from bitdraft.quant.apply import Applied, apply_recipe
from bitdraft.quant.attention.apply import apply_to_attention
from bitdraft.quant.attention.kv_cache import WITH_STATES, SlotCache
from bitdraft.quant.attention.layer_kinds import LayerKinds, layer_kinds
from bitdraft.quant.checkpoints.attach import attach
from bitdraft.quant.checkpoints.cache_scales import stored_rounding
from bitdraft.quant.fingerprint import digest_of, fingerprint_of
from bitdraft.quant.fp32_products import frozen_product
from bitdraft.quant.linear import LowBitLinear
from bitdraft.quant.loading import first_line, load_model, placed, placed_text, read_config, stored_checkpoint
from bitdraft.quant.profiles import profile_named
from bitdraft.quant.recipe import Recipe
from bitdraft.quant.recurrent.by_level import WatchedCache, by_level, modules_with_states
from bitdraft.quant.transforms import TransformedInput

CompileChoice = Literal["auto", "on", "off"]

_FINAL_NORMS = ("norm", "final_layernorm", "norm_f", "embedding_norm")  # Falcon-H1, Mamba, LFM2


@dataclass(frozen=True)
class TargetStates:
    """What a head sees of the target."""

    captured: Tensor  # [B, T, A, H] residual streams at the capture ids, in the target's dtype
    last_hidden: Tensor  # [B, T, H] after the final norm, in the target's dtype


class LowBitTarget:
    """A frozen causal LM with a recipe applied in place. Never trained, never changed."""

    def __init__(self, model: nn.Module, recipe: Recipe, applied: Applied, *, name: str, fingerprint: str) -> None:
        self.model, self.recipe, self.applied = model, recipe, applied
        self.name = name
        self.fingerprint = fingerprint
        self.config: Any = model.config
        self.decoder: Any = model.get_decoder()  # type: ignore[operator]

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def context_length(self) -> int:
        """Tokens that a sequence may have; ``sys.maxsize`` for a model that counts no positions (Mamba-2)."""
        return int(getattr(self.config, "max_position_embeddings", None) or sys.maxsize)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def embedding(self) -> nn.Embedding:
        return self.model.get_input_embeddings()  # type: ignore[operator]

    @property
    def output_head(self) -> Any:
        """An ``nn.Linear``, or what a recipe put in its place: a ``LowBitLinear``, also behind a transform."""
        return self.model.get_output_embeddings()  # type: ignore[operator]

    @property
    def output_weight(self) -> Tensor:
        """``[V, H]`` in the target's dtype: what the output head stands for, also where a recipe quantized it."""
        head = self.output_head
        weight: Tensor = head.dequantized() if isinstance(head, LowBitLinear | TransformedInput) else head.weight
        return weight.to(self.dtype)

    @property
    def final_norm(self) -> nn.Module:
        """What makes the last hidden state of the last residual stream; ``ValueError`` where its name is not known."""
        norm: nn.Module | None = next(
            (getattr(self.decoder, n) for n in _FINAL_NORMS if hasattr(self.decoder, n)), None
        )
        if norm is not None:
            return norm
        raise ValueError(
            f"{self.name}: {type(self.decoder).__name__} has no final norm (quant/target.py, _FINAL_NORMS)"
        )

    def new_cache(self, slots: int) -> SlotCache:
        """An empty cache for sequences of up to ``slots`` tokens; ``ValueError`` for a kind of layer without one."""
        return SlotCache(self._kinds.memories, slots, self.applied.cache)

    @cached_property
    def _kinds(self) -> LayerKinds:
        return layer_kinds(self.model, self.name)

    @cached_property
    def _with_states(self) -> dict[nn.Module, int]:
        """The modules that read recurrent or convolution states, and the number of their layer."""
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        cache = WatchedCache(self._kinds.memories, 2, self.applied.cache)
        found = modules_with_states(self.decoder, cache, lambda: self.prefill(tokens, tokens[:, 0] + 2, cache=cache))
        silent = {i for i, memory in enumerate(self._kinds.memories) if memory in WITH_STATES} - set(found.values())
        if silent:
            raise ValueError(
                f"{self.name}: layer {min(silent)} is recurrent but keeps its state elsewhere than in transformers' "
                "cache, where drafts cannot branch off it: use another target"
            )
        return found

    @torch.no_grad()
    def states(
        self,
        input_ids: Tensor,
        *,
        capture: Sequence[int] = (),
        cache: SlotCache | None = None,
        lengths: Tensor | None = None,
        parents: Tensor | None = None,
    ) -> TargetStates:
        """Run the decoder.

        ``input_ids``: ``[B, T]``, padded on the right (a causal model's real tokens never see the padding).
        With ``cache``, ``lengths`` ``[B]`` tells how many tokens each row already has; the new ones follow, one
        after the other or, with ``parents`` ``[B, T]``, as the nodes of a tree (-1 at its root). ``cache.commit`` says
        afterwards which of them stay.
        """
        if cache is None:
            return self._run(input_ids, capture, use_cache=False)
        assert lengths is not None
        with_states = self._with_states if cache.has_states else {}  # found before the pass begins
        positions, mask = cache.begin(lengths, input_ids.shape[1], parents)
        with by_level(with_states, cache):
            return self._run(input_ids, capture, **self._through(cache, positions, mask))

    @torch.no_grad()
    def prefill(
        self, input_ids: Tensor, lengths: Tensor, *, cache: SlotCache, capture: Sequence[int] = ()
    ) -> TargetStates:
        """Run prompts into an empty ``cache`` and keep them: ``[B, T]``, padded on the right behind ``lengths`` ``[B]``
        tokens each. States of the padding are of no use.

        Padding would enter a recurrent state, so where there is one, prompts of one length run together, without any.
        """
        if not cache.has_states:  # keys of the padding lie behind every row's tokens: never seen, overwritten
            return self.states(input_ids, capture=capture, cache=cache, lengths=torch.zeros_like(lengths))
        batch, longest = input_ids.shape
        order: list[Tensor] = []
        found: TargetStates | None = None
        for length in lengths.unique().tolist():
            rows = (lengths == length).nonzero()[:, 0]
            few = cache if not order else self.new_cache(cache.slots)
            positions, mask = few.begin(torch.zeros_like(lengths[rows]), length, stays=True)
            some = self._run(input_ids[rows, :length], capture, **self._through(few, positions, mask))
            if found is None:
                found = TargetStates(
                    *(x.new_zeros(batch, longest, *x.shape[2:]) for x in (some.captured, some.last_hidden))
                )
            found.captured[rows, :length], found.last_hidden[rows, :length] = some.captured, some.last_hidden
            if few is not cache:
                cache.join(few)
            order.append(rows)
        assert found is not None
        cache.keep_rows(torch.cat(order).argsort())
        return found

    def trainable_states(self, input_ids: Tensor, capture: Sequence[int] = ()) -> TargetStates:
        """``states`` of whole sequences, differentiable by the adapters that somebody has put into the model."""
        return self._run(input_ids, capture, use_cache=False)

    def _through(self, cache: SlotCache, positions: Tensor, mask: Tensor) -> dict[str, Any]:
        """What the decoder is told in the pass that ``cache`` has begun."""
        additive = self.dtype if self.config._attn_implementation == "eager" else None
        told = {"cache": cache, "use_cache": True, "attention_mask": self._kinds.masks(cache, mask, additive)}
        if "position_ids" in inspect.signature(self.decoder.forward).parameters:
            told["position_ids"] = positions
        return told

    def _run(self, input_ids: Tensor, capture: Sequence[int], **options: Any) -> TargetStates:
        streams: dict[int, Tensor] = {}
        handles = [
            self.decoder.layers[k].register_forward_pre_hook(_keep(streams, k), with_kwargs=True) for k in capture
        ]
        try:
            last = self.decoder(input_ids=input_ids, **options).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
            self.applied.forget()
        kept = [streams[k].to(self.device) for k in capture]  # layers may lie on several devices
        captured = torch.stack(kept, dim=2) if capture else last.new_empty(*last.shape[:2], 0, 0)
        # Residual streams may be fp32 (Mamba-2).
        return TargetStates(captured.to(self.dtype), last.to(self.device, self.dtype))

    def logits(self, last_hidden: Tensor) -> Tensor:
        """``[..., H]`` → ``[..., V]`` in the target's dtype, with the architecture's own soft cap or scale."""
        # Flat: for rows of a slice, torch multiplies in bf16 on CPU many times slower.
        flat = last_hidden.reshape(-1, last_hidden.shape[-1])
        logits = self.finish_logits(self.output_head(flat))
        return logits.view(*last_hidden.shape[:-1], logits.shape[-1])

    def logits_of(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        """A function from hidden states ``[..., H]`` to the logits ``[..., D]`` of ``token_ids`` ``[D]`` alone."""
        ids, head = token_ids.to(self.device), self.output_head
        if len(ids) == self.vocab_size and torch.equal(ids, torch.arange(len(ids), device=ids.device)):
            return self.logits
        if isinstance(head, LowBitLinear | TransformedInput):  # its blocks may span rows
            return lambda last_hidden: self.logits(last_hidden)[..., ids]
        rows = head.weight.detach()[ids]
        bias = None if head.bias is None else head.bias.detach()[ids]
        return lambda last_hidden: self.finish_logits(frozen_product(last_hidden, rows, bias))

    def finish_logits(self, logits: Tensor) -> Tensor:
        """What the architecture does to the output head's product before it is called logits."""
        if (factor := getattr(self.config, "lm_head_multiplier", None)) is not None:  # Falcon-H1
            logits = logits * factor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.no_grad()
    def top_tokens(self, last_hidden: Tensor, rows: int = 512) -> Tensor:
        """Greedy next tokens ``[N]`` for hidden states ``[N, H]``; never more than ``rows × V`` logits at once."""
        return torch.cat([self.logits(part).max(-1).indices for part in last_hidden.split(rows)])


def _keep(streams: dict[int, Tensor], k: int) -> Any:
    def hook(_module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        streams[k] = args[0] if args else options["hidden_states"]

    return hook


def can_compile() -> bool:
    """Whether ``torch.compile`` has a C++ compiler to work with on CPU."""
    return shutil.which("g++") is not None or shutil.which("clang++") is not None


def load_tokenizer(target: str, *, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer; ``ValueError`` where it is missing or has no chat template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"no tokenizer could be loaded for target {target!r}: {first_line(error)}") from error
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of target {target!r} has no chat template, which conversations need")
    return tokenizer


def load_target(
    target: str,
    recipe: Recipe,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    compile_quantizer: CompileChoice = "auto",
    calibration: Sequence[Tensor] | None = None,
    trust_remote_code: bool = False,
) -> LowBitTarget:
    """Load a model folder or hub id, freeze it and apply ``recipe``.

    Recipes with static activation scales and those that look at inputs are calibrated on ``calibration`` (token ids
    ``[B, T]`` each, without padding), which becomes part of the target's recipe; static scales by default on the text
    that ships with Bitdraft. The recipe ``AUTO`` takes a quantized checkpoint as it is: its
    codes are decoded, and the target's recipe says what was found. Raises ``ValueError`` in one sentence for a
    target that is missing, damaged or incomplete, that is already quantized under another recipe, or not under
    ``AUTO``.
    """
    if compile_quantizer == "on" and not can_compile():
        raise ValueError("--compile-quantizer on needs a C++ compiler (g++ or clang++) on the PATH")
    compiled = compile_quantizer == "on" or (compile_quantizer == "auto" and can_compile())
    config = read_config(target, trust_remote_code)
    stored = stored_checkpoint(target, config, recipe, dtype)
    model = placed(load_model(target, config, dtype, trust_remote_code, stored), device)
    if stored is not None:
        scales = {name: layer.weight.outer for name, layer in stored.layers.items() if layer.weight.outer is not None}
        scales |= {f"{n}.input": x.input_scale for n, x in stored.layers.items() if x.input_scale is not None}
        cache = None
        if stored.has_fp8_cache or recipe.kv is not None:
            cache = stored_rounding(model, stored.cache_tensors)
            scales |= stored.cache_tensors
        fingerprint = fingerprint_of(model, scales)
        applied, found = attach(model, stored, compiled=compiled, profile=profile_named(recipe.profile))
        recipe = replace(found, name=recipe.name, kv=None if cache is None else cache.rule)
        applied = apply_to_attention(model, recipe, applied, stored=cache)
    else:
        fingerprint = fingerprint_of(model)
        if calibration is not None and (recipe.has_static_inputs or recipe.looks_at_inputs):
            recipe = replace(recipe, calibrated_on=digest_of(calibration))
        elif recipe.has_static_inputs and not recipe.looks_at_inputs:  # a page is too little for those
            calibration = calibration_ids(load_tokenizer(target, trust_remote_code=trust_remote_code))
        moved = placed_text(model, calibration or ())
        applied = apply_recipe(model, recipe, compiled=compiled, calibration=moved)
        applied = apply_to_attention(model, recipe, applied, moved)
    wrapped = LowBitTarget(model, recipe, applied, name=target, fingerprint=fingerprint)
    _compute_exactly(wrapped)
    _check_logits(wrapped)
    return wrapped


def _compute_exactly(target: LowBitTarget) -> None:
    """Products in the engines' exact order where the recipe asks for it; calibration has gone the fast way."""
    for layer in target.model.modules():
        if isinstance(layer, LowBitLinear):
            layer.exact_product = target.recipe.exact_product


def calibration_ids(tokenizer: Any) -> list[Tensor]:
    """The shipped calibration text, one ``[1, T]`` tensor of token ids per paragraph."""
    text = resources.files("bitdraft.quant").joinpath("calibration.txt").read_text(encoding="utf-8")
    paragraphs = [p for p in text.split("\n\n") if p.strip()]
    return [torch.tensor([tokenizer(p, add_special_tokens=False)["input_ids"]]) for p in paragraphs]


@torch.no_grad()
def _check_logits(target: LowBitTarget) -> None:
    """Refuse an architecture whose logits are not what ``LowBitTarget.logits`` computes."""
    ids = torch.arange(8, device=target.device)[None] % target.vocab_size
    expected = target.model(input_ids=ids, use_cache=False).logits
    computed = target.logits(target.states(ids).last_hidden)
    if not torch.isfinite(expected).all():
        raise ValueError(f"{target.name} computes NaN or infinity: a damaged checkpoint, or a recipe it cannot bear")
    if not torch.allclose(expected.float(), computed.float(), rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"{target.name}: {type(target.model).__name__} changes its logits after the output head in a way "
            "that is not known here (quant/target.py, finish_logits)"
        )
