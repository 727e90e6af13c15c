"""How long the export of a large head takes, and how much memory beyond the head's own.

    python scripts/bench/export_head.py --json docs/results/export.json

An EAGLE-3 head with random fp32 weights for a target of the 32B class, whose embedding is there in bf16, is written in
each layout. Memory is the process's largest resident size while it writes, less what it had before (Linux counts it). A
head that took more than the limits is an error.
"""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from bitdraft.quant.files import folder_written_atomically, write_text_atomically
from bitdraft.quant.rotation import ORIGINAL
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.eagle3_layer import LayerShape
from bitdraft.speculators.export import LAYOUTS, write_head, write_manifest
from bitdraft.speculators.formats.facts import TargetFacts
from bitdraft.speculators.vocab import DraftVocab
from bitdraft.train.environment import RunFailed, forget_peak, machine_facts, resident_bytes, stop_cleanly


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the export of a large head."""

    hidden_size: int = 5120
    intermediate_size: int = 25_600
    heads: int = 64
    key_value_heads: int = 8
    head_dim: int = 128
    layers: int = 64
    """Of the target."""
    vocab: int = 151_936
    draft_vocab: int = 32_000
    most_seconds: float = 60.0
    most_gib: float = 2.0
    folder: Path | None = None
    """Where heads are written and removed again; by default the system's folder for temporary files."""
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers."""


def main(options: Options) -> None:
    torch.manual_seed(0)
    head = random_head(options)
    sizes = {name: p.numel() * p.element_size() for name, p in head.named_parameters()}
    embedding = head.embedding_weight
    results = []
    for name in (layout.NAME for layout in LAYOUTS.values() if head.kind == layout.KIND):
        results.append({"format": name, **measured(head, facts(), name, options.folder)})
        print(
            "{format:20s} {seconds:6.1f} s, {extra_gib:.2f} GiB more, {file_gib:.2f} GiB on disk".format(**results[-1])
        )
    document = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "head": {
            "parameters": sum(p.numel() for p in head.parameters()),
            "gib": gib(sum(sizes.values())),
            "dtype": "float32",
            "draft_vocabulary": options.draft_vocab,
        },
        "target": {
            "hidden_size": options.hidden_size,
            "vocabulary": options.vocab,
            "embedding_gib": gib(embedding.numel() * embedding.element_size()),
            "dtype": "bfloat16",
        },
        "limits": {"seconds": options.most_seconds, "extra_gib": options.most_gib},
        "results": results,
        "machine": machine_facts(),
    }
    if options.json:
        write_text_atomically(options.json, json.dumps(document, indent=2) + "\n")
    for row in results:
        if row["seconds"] > options.most_seconds or row["extra_gib"] > options.most_gib:
            raise RunFailed(f"{row['format']}: over the limits of {options.most_seconds} s and {options.most_gib} GiB")


def random_head(options: Options) -> Eagle3Head:
    """Weights as training leaves them, fp32; the embedding in bf16 as a target's."""
    shape = LayerShape(
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_attention_heads=options.heads,
        num_key_value_heads=options.key_value_heads,
        head_dim=options.head_dim,
        rms_norm_eps=1e-6,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    ids = torch.randperm(options.vocab)[: options.draft_vocab].sort().values
    captured = (2, options.layers // 2, options.layers - 3)
    embedding = torch.empty(options.vocab, options.hidden_size, dtype=torch.bfloat16).normal_(std=0.02)
    head = Eagle3Head(Eagle3Config(), shape, captured, DraftVocab(ids, options.vocab), embedding)
    head.capture_scale.copy_(torch.tensor([4.0, 1.0, 0.25]))
    return head


def facts() -> TargetFacts:
    return TargetFacts(
        name="a target of the 32B class",
        architectures=("Qwen3ForCausalLM",),
        recipe="mxfp4",
        recipe_fingerprint="0" * 16,
        fingerprint="0" * 16,
        residual_basis=ORIGINAL,
        tokenizer=None,
    )


def measured(head: Eagle3Head, target: TargetFacts, layout: str, where: Path | None) -> dict[str, Any]:
    """Seconds, memory and bytes of one export, with manifest and flushed to the disk."""
    with tempfile.TemporaryDirectory(dir=where) as folder:
        forget_peak()
        before, start = resident_bytes("VmRSS"), time.perf_counter()
        with folder_written_atomically(Path(folder) / "head") as fresh:
            write_head(head, target, fresh, draft_length=3, layout=layout)
            write_manifest(fresh)
        seconds, peak = time.perf_counter() - start, resident_bytes("VmHWM")
        written = sum(p.stat().st_size for p in (Path(folder) / "head").iterdir())
    return {"seconds": seconds, "extra_gib": gib(peak - before), "file_gib": gib(written)}


def gib(count: int) -> float:
    return count / 2**30


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
