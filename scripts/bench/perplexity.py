"""What each way of quantizing the demo target costs in perplexity, and in divergence from the model as it was.

    python scripts/bench/perplexity.py --json docs/results/perplexity.json

Answers to held-out prompts are scored: those that the records hold, else greedy answers that the unquantized model
writes (kept in the cache). Perplexity and KL divergence (from the unquantized model's distribution, in nats) are means
over the tokens of the answers. Methods that look at inputs are calibrated block by block on ``--calibration``.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor, nn

from bitdraft.data.chat import Example, end_of_turn_ids, written_examples
from bitdraft.data.demo_target import resolve_target
from bitdraft.data.regenerate import AnswerSettings, on_policy_examples
from bitdraft.data.sources import Conversation, demo_file, read_conversations
from bitdraft.quant.apply import fused_groups, watching_inputs
from bitdraft.quant.block import Quantized, nvfp4_global_scale
from bitdraft.quant.calibrate import calibrate_layer_by_layer
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.gptq import gptq_quantize
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.recipe import Rule, load_recipe
from bitdraft.quant.scales.methods import quantize_together, scale_method
from bitdraft.quant.schemes import MXFP4_EVEN, MXFP4_RCEIL, NVFP4, NVFP4_KERNEL, Scheme
from bitdraft.quant.target import LowBitTarget, load_target, load_tokenizer
from bitdraft.quant.transforms import (
    BlockTransform,
    TransformedInput,
    TransformMemory,
    fold_transform,
    hadamard_transform,
)
from bitdraft.quant.wush import wush_transform
from bitdraft.train.environment import chosen_dtype, machine_facts, read_environment, stop_cleanly
from bitdraft.train.gap import gap_on


@dataclass(frozen=True)
class Method:
    """One way to quantize every linear layer of the decoder's blocks."""

    weights: Scheme
    activations: Scheme | None = None
    scales: str = "amax"
    gptq: bool = False
    act_order: bool = False
    transform: Literal["hadamard", "wush"] | None = None

    @property
    def looks_at_inputs(self) -> bool:
        return self.gptq or self.transform == "wush"


_A4 = Method(MXFP4_EVEN, MXFP4_RCEIL)
METHODS = {
    "nvfp4a16": Method(NVFP4),
    "nvfp4a16 4/6": Method(NVFP4, scales="four-over-six"),
    "nvfp4a16 sweep": Method(NVFP4, scales="sweep"),
    "nvfp4a16 gptq": Method(NVFP4, gptq=True),
    "nvfp4a16 gptq 4/6": Method(NVFP4, scales="four-over-six", gptq=True),
    "nvfp4a16 gptq 4/6 act-order": Method(NVFP4, scales="four-over-six", gptq=True, act_order=True),
    "mxfp4a16": Method(MXFP4_EVEN),
    "mxfp4a16 gptq": Method(MXFP4_EVEN, gptq=True),
    "mxfp4a4": _A4,
    "mxfp4a4 hadamard": Method(MXFP4_EVEN, MXFP4_RCEIL, transform="hadamard"),
    "mxfp4a4 wush": Method(MXFP4_EVEN, MXFP4_RCEIL, transform="wush"),
    "mxfp4a4 wush gptq": Method(MXFP4_EVEN, MXFP4_RCEIL, transform="wush", gptq=True),
    "nvfp4": Method(NVFP4, NVFP4_KERNEL),
    "nvfp4 hadamard": Method(NVFP4, NVFP4_KERNEL, transform="hadamard"),
    "nvfp4 wush": Method(NVFP4, NVFP4_KERNEL, transform="wush"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Perplexity of a target under different ways of quantizing it."""

    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    methods: tuple[str, ...] = tuple(METHODS)
    data: tuple[Path, ...] = ()
    """JSONL files of conversations to score; by default the shipped held-out prompts."""
    calibration: tuple[Path, ...] = ()
    """JSONL files of conversations to calibrate on; by default the shipped training prompts."""
    records: int = 80
    """How many conversations to score."""
    calibration_records: int = 240
    """How many conversations to calibrate on, at most."""
    calibration_tokens: int = 32768
    max_new_tokens: int = 128
    """Length of the answers that the unquantized model writes where the records hold none."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: str = "cpu"
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers."""

    def __post_init__(self) -> None:
        if unknown := set(self.methods) - set(METHODS):
            raise ValueError(f"unknown method {sorted(unknown)[0]!r} (known: {', '.join(METHODS)})")


def main(options: Options) -> None:
    cache = read_environment().cache_dir
    name = resolve_target(options.target, cache)
    tokenizer = load_tokenizer(name)
    dtype = chosen_dtype(options.dtype, options.device)

    def unquantized() -> LowBitTarget:
        return load_target(name, load_recipe("none"), dtype=dtype, device=options.device)

    def examples(files: Sequence[Path], records: int) -> list[Example]:
        conversations = read_conversations(files)[:records]
        return _answered(base, tokenizer, conversations, options.max_new_tokens, cache)

    base = unquantized()
    scored = examples(options.data or (demo_file("heldout"),), options.records)
    batches: list[Tensor] = []
    if any(METHODS[m].looks_at_inputs or METHODS[m].activations is NVFP4_KERNEL for m in options.methods):
        text = examples(options.calibration or (demo_file("train"),), options.calibration_records)
        batches = _stream(text, options.calibration_tokens, base.device)
    tokens = sum(len(e.answer) for e in scored)
    print(f"{len(scored)} answers, {tokens} tokens; calibration on {sum(b.numel() for b in batches)} tokens; {dtype}")
    print(f"{'method':30} {'perplexity':>10} {'KL':>8} {'seconds':>8}")
    results: list[dict[str, object]] = []
    for label in (None, *options.methods):
        target, seconds = base, 0.0
        if label is not None:
            target, start = unquantized(), time.perf_counter()
            quantize_model(target, METHODS[label], batches)
            seconds = time.perf_counter() - start
        perplexity, divergence = _score(target, base, scored)
        shown = label or "unquantized"
        print(f"{shown:30} {perplexity:10.4f} {divergence:8.4f} {seconds:8.1f}", flush=True)
        results.append({"method": shown, "perplexity": perplexity, "kl": divergence, "seconds": seconds})
    if options.json:
        document = {
            "target": options.target,
            "dtype": str(dtype),
            "answers": len(scored),
            "tokens": tokens,
            "calibration_tokens": sum(b.numel() for b in batches),
            "results": results,
            "machine": machine_facts(),
        }
        write_text_atomically(options.json, json.dumps(document, indent=2) + "\n")


def _answered(
    base: LowBitTarget, tokenizer: Any, conversations: Sequence[Conversation], new_tokens: int, cache: Path
) -> list[Example]:
    """The answers that the records hold, or the unquantized model's where they hold none."""
    ends = end_of_turn_ids(base.model, tokenizer)
    if all(any(m.role == "assistant" for m in c.messages) for c in conversations):
        return [e for c in conversations for e in written_examples(tokenizer, c, ends)]
    settings = AnswerSettings(max_new_tokens=new_tokens, batch_size=32)
    return on_policy_examples(base, tokenizer, conversations, settings, end_ids=ends, cache_dir=cache)


def _stream(examples: Sequence[Example], tokens: int, device: torch.device, length: int = 512) -> list[Tensor]:
    """Batches ``[4, 512]`` cut from all texts behind each other: no padding, at most ``tokens`` in all."""
    ids = torch.tensor([t for e in examples for t in (*e.prompt, *e.answer)][:tokens], device=device)
    rows = ids[: len(ids) // length * length].view(-1, length)
    if len(rows) == 0:
        raise ValueError(f"the calibration text has {len(ids)} tokens, fewer than {length}")
    return list(rows.split(4))


def quantize_model(target: LowBitTarget, method: Method, batches: Sequence[Tensor]) -> None:
    """Replace every linear layer of the decoder's blocks, in place."""
    model, memory, quantizer = target.model, TransformMemory(), target.applied.quantizer
    together = _together(model)
    transforms: dict[str, BlockTransform | None] = {}
    scaled: dict[str, Quantized] = {}
    # Static input scales are measured once the weights are what they will be.
    static = method.activations is not None and method.activations.has_global_scale
    activations = None if static else method.activations

    def visit(name: str, linear: nn.Linear, hessian: Tensor) -> None:
        members = together[name]
        if name == members[0]:
            linears = [model.get_submodule(m) for m in members]
            weights = torch.cat([layer.weight for layer in linears])  # type: ignore[misc]
            transform = _transform(method, hessian, weights, target.dtype)
            for layer in linears:
                if transform is not None:
                    fold_transform(layer, transform)  # type: ignore[arg-type]
            chosen = quantize_together(
                [layer.weight for layer in linears],  # type: ignore[misc]
                method.weights,
                scale_method(method.scales, method.weights),
            )
            transforms.update(dict.fromkeys(members, transform))
            scaled.update(zip(members, chosen, strict=True))
        q, transform = scaled.pop(name), transforms[name]
        if method.gptq:
            q = gptq_quantize(
                linear.weight,
                hessian if transform is None else transform.moments(hessian),
                method.weights,
                global_scale=None if q.outer is None else 1.0 / q.outer,
                scales=q.scale,
                act_order=method.act_order,
            )
        low: nn.Module = LowBitLinear(linear, method.weights, activations, quantizer, quantized=q)
        model.set_submodule(name, low if transform is None else TransformedInput(low, transform, memory))

    if method.looks_at_inputs:
        calibrate_layer_by_layer(model, batches, visit)
    else:
        for name in together:
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            visit(name, linear, torch.empty(0))
    if static:
        _set_static_scales(target, method, batches[:4], quantizer)


def _transform(method: Method, hessian: Tensor, weights: Tensor, dtype: torch.dtype) -> BlockTransform | None:
    block = method.weights.block
    assert block is not None
    if method.transform is None:
        return None
    if method.transform == "hadamard":
        return hadamard_transform(block, dtype)
    return wush_transform(hessian, weights, block, dtype)


def _together(model: nn.Module) -> dict[str, list[str]]:
    """Every linear layer of the blocks, with those that read the same input."""
    rule = Rule("*.layers.*")
    linears = {n: rule for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n}
    return {name: members for members in fused_groups(linears) for name in members}


@torch.no_grad()
def _set_static_scales(
    target: LowBitTarget, method: Method, batches: Sequence[Tensor], quantizer: ActivationQuantizer
) -> None:
    layers = {name: m for name, m in target.model.named_modules() if isinstance(m, LowBitLinear)}
    largest: dict[str, Tensor] = {}
    with watching_inputs(target.model, set(layers), largest):
        for ids in batches:
            target.states(ids)
    for name, layer in layers.items():
        layer.input_global_scale, layer.activations = nvfp4_global_scale(largest[name]), method.activations
    quantizer.forget()


def _score(target: LowBitTarget, base: LowBitTarget, examples: Sequence[Example]) -> tuple[float, float]:
    """Perplexity of the answers and mean KL divergence from ``base``, over answer tokens."""
    gap = gap_on(base, target, examples, capture=())
    return math.exp(gap.nll_low.double().mean()), float(gap.kl_reference_low.double().mean())


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
