"""Tokens per CPU-second that a trainer of draft heads gets through, beside SpecForge's where it is installed.

    python scripts/bench/train_throughput.py --json OUT.json
    taskset -c 1 python scripts/bench/train_throughput.py --specforge-python ENV/bin/python --json OUT.json

An EAGLE-3 head is trained against a small random Llama in fp32 on one thread: the target's states from memory
(``cached``), or its forward pass included (``with_target``). In one case half of every document is the assistant's and
supervised, in ``..._all`` everything is. Every trainer has a process of its own and they take turns, step by step, so
that a drifting machine slows all of them alike; CPU time counts, not the clock, and ratios are taken within each round.

Before the first step both say what their loss is at every draft step, on the same weights and data: a difference above
1e-4 is an error. docs/benchmarks.md says how SpecForge is installed, and what is compared.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from safetensors.torch import save_file
from torch import Tensor

from bitdraft.data.capture import capture_pack
from bitdraft.data.chat import Example
from bitdraft.data.packing import make_pack
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import load_target
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head, default_capture_layers
from bitdraft.speculators.vocab import DraftVocab
from bitdraft.train.environment import RunFailed, machine_facts, stop_cleanly

# B document, T position, A captured layer, H hidden, D draft vocabulary, V target vocabulary, K draft step.

_TRAINERS = Path(__file__).with_name("train_throughput_trainers.py")
CASES = {
    "cached": "half cached",
    "with_target": "half with_target",
    "cached_all": "all cached",
    "with_target_all": "all with_target",
}
"""What is supervised and where the states come from, by the name that the case has in the results."""
_SAME = 1e-4  # losses that may be called the same


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time optimizer steps of a draft head's training."""

    hidden_size: int = 256
    intermediate_size: int = 704
    layers: int = 8
    """Of the target."""
    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 64
    vocab: int = 8192
    draft_vocab: int = 4096
    documents: int = 2
    """Per optimizer step."""
    tokens: int = 256
    """Per document."""
    steps: int = 7
    """Draft steps of the training-time test."""
    rounds: int = 15
    """Optimizer steps that are timed, per trainer and case."""
    specforge_python: Path | None = None
    """Python of an environment that holds SpecForge."""
    specforge_compile: bool = False
    """Let SpecForge compile the functions that it marks for torch.compile (needs a C++ compiler)."""
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers."""

    def __post_init__(self) -> None:
        for name in ("documents", "tokens", "steps", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.tokens < 4:
            raise ValueError(f"--tokens must be at least 4, got {self.tokens}: half of them are supervised")
        if self.specforge_python is not None and not self.specforge_python.is_file():
            raise ValueError(
                f"--specforge-python {self.specforge_python} is not a file: give the interpreter of the environment "
                "that SpecForge is installed in (docs/benchmarks.md)"
            )


def main(options: Options) -> None:
    torch.manual_seed(0)
    commands = {"bitdraft": [sys.executable, str(_TRAINERS), "bitdraft"]}
    if options.specforge_python is not None:
        commands["specforge"] = [str(options.specforge_python), str(_TRAINERS), "specforge"]
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder = Path(name)
        prepare(options, folder)
        compiled = ["--compile"] if options.specforge_compile else []
        trainers = {
            who: running.enter_context(started(who, [*command, name, *(compiled if who == "specforge" else [])]))
            for who, command in commands.items()
        }
        steps: dict[str, dict[str, list[Any]]] = {who: {case: [] for case in CASES} for who in trainers}
        for number in range(-2, options.rounds):  # two to warm up
            for case, words in CASES.items():
                for who, trainer in trainers.items():
                    found = trainer.ask(words)
                    if number >= 0:
                        steps[who][case].append(found)
    document = {**results(options, steps, trainers), **provenance(options)}
    show(document)
    if options.json:
        write_text_atomically(options.json, json.dumps(document, indent=2) + "\n")
    require_same_work(document)


def require_same_work(document: Mapping[str, Any]) -> None:
    """``RunFailed`` unless the trainers train as many weights and begin with the same losses."""
    if "specforge" not in document:
        return
    ours, theirs = document["trained_parameters"], document["specforge"]["trained_parameters"]
    if ours != theirs:
        raise RunFailed(f"bitdraft trains {ours} parameters and specforge {theirs}: their work is not the same")
    if (apart := document["first_losses"]["largest_difference"]) > _SAME:
        raise RunFailed(
            f"losses at the first step differ by {apart:.1e}, more than {_SAME}: the trainers' work is not the same"
        )


def prepare(options: Options, folder: Path) -> None:
    """Write to ``folder`` what every trainer reads: target, batch, states, masks and the head's first weights."""
    write_target(options, folder / "target")
    target = load_target(str(folder / "target"), load_recipe("none"), dtype=torch.float32)
    layers = default_capture_layers(target.layers)
    tokens = torch.randint(0, options.vocab, (options.documents, options.tokens))
    prompts = {"half": options.tokens // 2, "all": 1}
    tensors: dict[str, Tensor] = {"tokens": tokens}
    for mask, prompt in prompts.items():
        examples = [Example(str(i), "", tuple(r[:prompt]), tuple(r[prompt:])) for i, r in enumerate(tokens.tolist())]
        tensors[f"supervised.{mask}"] = make_pack(examples).predicts_written().view_as(tokens)
        states = capture_pack(target, examples, layers)  # of "all" at last
    tensors["captured"] = states.captured.unflatten(0, tokens.shape)
    tensors["last_hidden"] = states.last_hidden.unflatten(0, tokens.shape)
    vocab = draft_vocab(states.first_choices, options)
    head = Eagle3Head.from_target(Eagle3Config(steps=options.steps, train_output=True, start="random"), target, vocab)
    tensors["target_ids"] = vocab.target_ids
    tensors |= {f"head.{n}": p.detach().clone() for n, p in head.named_parameters()}
    tensors["head.fc.weight"] = head.folded_fc.clone()
    save_file(tensors, folder / "features.safetensors")
    facts = {"prompts": prompts, "steps": options.steps, "lr": 1e-4, "capture_layers": layers}
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def write_target(options: Options, folder: Path) -> None:
    """A random Llama, as an ordinary model folder."""
    hidden, inner = options.hidden_size, options.intermediate_size
    queries, shared = options.heads * options.head_dim, options.key_value_heads * options.head_dim
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (shared, hidden),
        "self_attn.v_proj": (shared, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {f"model.layers.{i}.{name}": shape for i in range(options.layers) for name, shape in layer.items()}
    shapes |= dict.fromkeys(("model.embed_tokens", "lm_head"), (options.vocab, hidden)) | {"model.norm": (hidden,)}
    weights = {  # matrices large enough for distributions that have a shape
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else 0.05 * torch.randn(shape)
        for name, shape in shapes.items()
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.key_value_heads,
        "head_dim": options.head_dim,
        "vocab_size": options.vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def draft_vocab(first_choices: Tensor, options: Options) -> DraftVocab:
    """Most of the target's first choices and others, so that some supervised positions have a choice outside."""
    distinct = first_choices.unique()
    outside = distinct[::20]
    ranked = torch.cat([distinct[~torch.isin(distinct, outside)], torch.arange(options.vocab)])
    ranked = ranked[~torch.isin(ranked, outside)]
    kept = list(dict.fromkeys(ranked.tolist()))[: options.draft_vocab]
    if len(kept) < options.draft_vocab:
        raise ValueError(f"--draft-vocab {options.draft_vocab} must be smaller: {len(outside)} tokens stay outside")
    return DraftVocab(torch.tensor(sorted(kept)), options.vocab)


class Running:
    """A trainer in its process."""

    def __init__(self, who: str, process: "subprocess.Popen[str]", log: Path) -> None:
        self.who, self.process, self.log = who, process, log
        self.start = self._read()

    def ask(self, words: str) -> Any:
        """One optimizer step; what it took."""
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            words = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise RunFailed(f"{self.who} has ended: {words[-1] if words else 'without a word'}")
        return json.loads(line)


@contextmanager
def started(who: str, command: list[str]) -> Iterator[Running]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with (
            log.open("w", encoding="utf-8") as errors,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
            ) as process,
        ):
            yield Running(who, process, log)  # leaving closes its input, which ends it


def results(
    options: Options, steps: Mapping[str, Mapping[str, list[Any]]], trainers: Mapping[str, Running]
) -> dict[str, Any]:
    """Ours at the top; the peer's, the ratios and both sides' losses beside it if there is a peer."""
    tokens = options.documents * options.tokens
    found = {who: {**{c: speed(tokens, taken) for c, taken in cases.items()}} for who, cases in steps.items()}
    for who, cases in steps.items():
        last = list(cases.values())[-1][-1]
        found[who] |= {name: last[name] for name in ("peak_rss_mib", "rss_before_mib")}
        found[who] |= {name: trainers[who].start[name] for name in ("trained_parameters", "versions")}
    ours = found.pop("bitdraft")
    if "specforge" not in found:
        return {**ours, "first_losses": {"bitdraft": trainers["bitdraft"].start["first_losses"]}}
    losses = {who: trainer.start["first_losses"] for who, trainer in trainers.items()}
    apart = max(
        abs(a - b)
        for mask in losses["bitdraft"]
        for a, b in zip(losses["bitdraft"][mask], losses["specforge"][mask], strict=True)
    )
    ratios = {
        case: statistics.median(
            b["cpu_seconds"] / a["cpu_seconds"] for a, b in zip(taken, steps["specforge"][case], strict=True)
        )
        for case, taken in steps["bitdraft"].items()
    }
    peer = {**found["specforge"], "compiled": options.specforge_compile}
    return {**ours, "specforge": peer, "ratios": ratios, "first_losses": {**losses, "largest_difference": apart}}


def speed(tokens: int, taken: list[Any]) -> dict[str, float]:
    cpu = sorted(step["cpu_seconds"] for step in taken)
    median = statistics.median(cpu)
    return {
        "tokens_per_cpu_second": tokens / median,
        "best_tokens_per_cpu_second": tokens / cpu[0],
        "cpu_seconds_per_step": median,
        "seconds_per_step": statistics.median(step["seconds"] for step in taken),
    }


def provenance(options: Options) -> dict[str, Any]:
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "shape": {k: v for k, v in asdict(options).items() if isinstance(v, int) and not isinstance(v, bool)},
        "machine": {**machine_facts(), "threads": 1},
    }


def show(document: Mapping[str, Any]) -> None:
    peer, ratios = document.get("specforge"), document.get("ratios", {})
    print(f"{'tokens per CPU-second':22} {'bitdraft':>9} {'specforge':>10} {'ratio':>6}")
    for case in CASES:
        line = f"{case:22} {document[case]['tokens_per_cpu_second']:9.0f}"
        if peer:
            line += f" {peer[case]['tokens_per_cpu_second']:10.0f} {ratios[case]:6.2f}"
        print(line)
    line = f"{'peak memory, MiB':22} {document['peak_rss_mib']:9.0f}"
    print(line + (f" {peer['peak_rss_mib']:10.0f}" if peer else ""))
    if peer:
        print(f"losses at the first step differ by at most {document['first_losses']['largest_difference']:.1e}")


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
