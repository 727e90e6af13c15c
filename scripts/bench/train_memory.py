"""How much memory a training step of a draft head takes, and how its time grows with the context.

    python scripts/bench/train_memory.py --json docs/results/train_memory.json

One document of 8192 tokens, all of them supervised, a vocabulary of 128k of which 32k are drafted, seven steps of the
training-time test, forward and backward; the states of the target are random. Memory is the process's largest resident
size during the step, less what it had before (Linux counts it), beside what the formulas would take if they were
written down as they stand: attention scores [heads, T, T + k] of every step, the teacher's logits [T, V], and logits,
probabilities and gradients [T, D] of every step, in fp32. Time is the processor's, per token, at contexts from 1k to
16k, whole and without the attention. A step that takes more than a third of the formula's memory is an error.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import tyro

from bitdraft.data.packing import Pack
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.target import TargetStates
from bitdraft.speculators import eagle3
from bitdraft.speculators.documents import Documents
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.eagle3_layer import LayerShape
from bitdraft.speculators.vocab import DraftVocab
from bitdraft.train.environment import RunFailed, forget_peak, machine_facts, resident_bytes, stop_cleanly
from bitdraft.train.loss_terms import LossConfig
from bitdraft.train.module import TrainedHead
from bitdraft.train.states import Supervision

MOST = 1 / 3  # of the formula's memory


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure a training step."""

    hidden_size: int = 512
    intermediate_size: int = 1408
    heads: int = 8
    key_value_heads: int = 4
    steps: int = 7
    vocab: int = 131_072
    draft_vocab: int = 32_768
    tokens: int = 8192
    contexts: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    """Of the timings, whose vocabulary is small: the loss costs each token the same."""
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers."""


def main(options: Options) -> None:
    torch.manual_seed(0)
    memory = measured_memory(options)
    print(
        f"{options.tokens} tokens: {memory['peak_mib']:.0f} MiB at most, {memory['share']:.1%} of the formula's "
        f"{memory['formula_mib']:.0f}; with recomputed activations {memory['recomputing_peak_mib']:.0f} MiB"
    )
    times = measured_times(options)
    for row in times:
        print(
            "{context:6.0f} tokens: {microseconds_per_token:8.0f} µs per token, {attention_microseconds:8.0f} of it "
            "attention, {other_microseconds:6.0f} the rest".format(**row)
        )
    document = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "shape": {name: value for name, value in vars(options).items() if name != "json"},
        "memory": memory,
        "times": times,
        "machine": machine_facts(),
    }
    if options.json:
        write_text_atomically(options.json, json.dumps(document, indent=2) + "\n")
    if memory["share"] > MOST:
        raise RunFailed(f"a step takes {memory['share']:.1%} of the formula's memory, more than a third")


def measured_memory(options: Options) -> dict[str, float]:
    module, supervision = made(options, options.tokens)
    run(module, made(options, 64)[1])  # what libraries set aside at first use
    peaks = []
    for recompute in (False, True):
        module.head.recompute = recompute
        forget_peak()
        before = resident_bytes("VmRSS")
        run(module, supervision)
        peaks.append((resident_bytes("VmHWM") - before) / 2**20)
    formula = formula_bytes(options) / 2**20
    return {
        "peak_mib": peaks[0],
        "formula_mib": formula,
        "share": peaks[0] / formula,
        "recomputing_peak_mib": peaks[1],
    }


def formula_bytes(options: Options) -> int:
    """What the formulas take as they stand, in fp32; the rest of the layer is not counted."""
    scores = sum(options.heads * options.tokens * (options.tokens + k) for k in range(options.steps))
    logits = options.tokens * (options.vocab + 3 * options.steps * options.draft_vocab)
    return 4 * (scores + logits)


def measured_times(options: Options) -> list[dict[str, float]]:
    """The attention's own time is that of the step less that of one in which it is replaced by its queries."""
    small = replace(options, vocab=2048, draft_vocab=1024)
    rows = []
    for context in options.contexts:
        module, supervision = made(small, context)
        whole = processor_seconds(module, supervision)
        attention = eagle3.training_time_test_attention
        eagle3.training_time_test_attention = _no_attention
        try:
            other = processor_seconds(module, supervision)
        finally:
            eagle3.training_time_test_attention = attention
        rows.append(
            {
                "context": context,
                "microseconds_per_token": 1e6 * whole / context,
                "attention_microseconds": 1e6 * (whole - other) / context,
                "other_microseconds": 1e6 * other / context,
            }
        )
    return rows


def _no_attention(
    q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], documents: Documents
) -> torch.Tensor:
    del keys, values, documents
    return q


def processor_seconds(module: TrainedHead, supervision: Supervision) -> float:
    run(module, supervision)
    started = time.process_time()
    run(module, supervision)
    return time.process_time() - started


def run(module: TrainedHead, supervision: Supervision) -> None:
    module(supervision, float(supervision.supervised.sum())).loss.backward()
    module.zero_grad()


def made(options: Options, tokens: int) -> tuple[TrainedHead, Supervision]:
    """A random head with its loss, and a document of which every token was written by the assistant."""
    shape = LayerShape(
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_attention_heads=options.heads,
        num_key_value_heads=options.key_value_heads,
        head_dim=options.hidden_size // options.heads,
        rms_norm_eps=1e-6,
        max_position_embeddings=2 * max(options.tokens, *options.contexts),
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    vocab = DraftVocab(torch.arange(options.draft_vocab), options.vocab)
    embedding = torch.randn(options.vocab, options.hidden_size) * 0.02
    head = Eagle3Head(Eagle3Config(steps=options.steps), shape, (0, 1, 2), vocab, embedding)
    rows = torch.randn(options.draft_vocab, options.hidden_size) * 0.02
    module = TrainedHead(head, lambda hidden: hidden @ rows.T, LossConfig())
    ids = torch.randint(0, options.draft_vocab, (tokens,))
    supervision = Supervision(
        pack=Pack(("all",), ids, (0, tokens), (0,)),
        states=TargetStates(torch.randn(tokens, 3, options.hidden_size), torch.randn(tokens, options.hidden_size)),
        documents=Documents.whole([tokens]),
        first_choices=ids,
        log_normalisers=torch.zeros(tokens),
        supervised=torch.arange(tokens) < tokens - 1,
        weights=torch.ones(1),
        groups=torch.zeros(1, dtype=torch.int64),
        group_count=1,
    )
    return module, supervision


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
