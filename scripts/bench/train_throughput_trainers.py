"""The trainers that ``train_throughput.py`` times, each in a process and an environment of its own.

    PYTHON train_throughput_trainers.py bitdraft|specforge FOLDER [--compile]

FOLDER holds the target, the batch, its states and the head's first weights. Says on one line of standard output what it
computes at the start; then takes one optimizer step for every case that it reads from standard input, and answers each
with a line. Imports nothing of Bitdraft for a peer, and nothing of a peer for Bitdraft.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

# B document, T position, N = B·T, A captured layer, H hidden, D draft vocabulary, K draft step.


class Trainer(Protocol):
    packages: ClassVar[tuple[str, ...]]
    """What to write down the versions of."""

    def trained(self) -> Iterator[Tensor]:
        """The trained parameters."""

    def step_losses(self, mask: str) -> list[float]:
        """``K`` mean cross-entropies per supervised position, with the weights as they are."""

    def step(self, mask: str, *, with_target: bool) -> None:
        """One optimizer step, with the target's states from memory or from a forward pass."""


class Bitdraft:
    """The parts that ``train/loop.py`` puts together, in its order, without schedule, journal and checkpoints."""

    packages: ClassVar[tuple[str, ...]] = ("torch", "transformers")

    def __init__(self, folder: Path) -> None:
        from bitdraft.data.chat import Example
        from bitdraft.quant.presets import load_recipe
        from bitdraft.quant.target import load_target
        from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
        from bitdraft.speculators.vocab import DraftVocab
        from bitdraft.train import distribution
        from bitdraft.train.config import OptimConfig, RunConfig, StatesConfig
        from bitdraft.train.environment import read_environment
        from bitdraft.train.launch import make_accelerator
        from bitdraft.train.loss_terms import LossConfig
        from bitdraft.train.module import TrainedHead
        from bitdraft.train.states import StateSource

        given, facts = load_file(folder / "features.safetensors"), _facts(folder)
        target = load_target(str(folder / "target"), load_recipe("none"), dtype=torch.float32)
        config = Eagle3Config(steps=facts["steps"], train_output=True, start="random")
        self.head = Eagle3Head.from_target(config, target, DraftVocab(given["target_ids"], target.vocab_size))
        weights = {n.removeprefix("head."): x for n, x in given.items() if n.startswith("head.")}
        weights["capture_scale"] = torch.ones(len(self.head.capture_layers))  # the given fc holds the scales already
        self.head.load_state_dict(weights)
        teacher = target.logits_of(self.head.vocab.target_ids)
        self.module = TrainedHead(self.head, teacher, LossConfig())
        self.even_steps = lambda: TrainedHead(self.head, teacher, LossConfig(step_decay=1.0))
        run = RunConfig(optim=OptimConfig(lr=facts["lr"]), device="cpu", dtype="float32", tracker="none")
        self.accelerator, self.distribution = make_accelerator(run, read_environment(), folder), distribution
        self.clip = run.optim.clip
        self.wrapped, self.optimizer = distribution.prepared(
            self.accelerator, self.module, run.optim, target.dtype, self.module.groups
        )
        self.sources, self.documents = {}, range(len(given["tokens"]))
        for mask, prompt in facts["prompts"].items():
            examples = [
                Example(str(i), "", tuple(row[:prompt]), tuple(row[prompt:]))
                for i, row in enumerate(given["tokens"].tolist())
            ]
            for with_target in (False, True):
                states = StatesConfig(mode="online" if with_target else "memory")
                self.sources[mask, with_target] = StateSource(
                    target, examples, self.head.capture_layers, config.steps, states, uses=1, cache=folder
                )

    def trained(self) -> Iterator[Tensor]:
        return (p for p in self.head.parameters() if p.requires_grad)

    @torch.no_grad()
    def step_losses(self, mask: str) -> list[float]:
        supervision = self.sources[mask, False].supervision(self.documents)
        positions = float(supervision.supervised.sum())
        config, sums = self.head.config, [0.0]
        for steps in range(1, config.steps + 1):  # the loss is the mean over steps: the newest is what it has grown by
            self.head.config = replace(config, steps=steps)
            sums.append(steps * float(self.even_steps()(supervision, positions).loss))
        return [more - less for less, more in pairwise(sums)]

    def step(self, mask: str, *, with_target: bool) -> None:
        supervision = self.sources[mask, with_target].supervision(self.documents)
        losses = self.wrapped(supervision, float(supervision.supervised.sum()))
        self.distribution.backward(self.accelerator, self.wrapped, losses.loss)
        self.distribution.update(self.accelerator, self.wrapped, self.optimizer, self.clip)
        self.module.remember(losses.acceptance, losses.terms)


class SpecForge:
    """SpecForge's own strategy, model, target head and optimizer, on features that it reads offline.

    Its loss is a Triton kernel, which no CPU runs; in its place stands the reference that the same file of SpecForge
    defines it by. The target's forward pass is transformers', without logits: SpecForge has an engine for it.
    """

    packages: ClassVar[tuple[str, ...]] = ("specforge", "torch", "transformers")

    def __init__(self, folder: Path) -> None:
        model: Any = import_module("specforge.algorithms.eagle3.model")
        draft: Any = import_module("specforge.modeling.draft.llama3_eagle")
        heads: Any = import_module("specforge.modeling.target.target_head")
        transformers: Any = import_module("transformers")
        reference = import_module("specforge.core.loss")._compute_loss
        model.LogSoftmaxLoss = type("Reference", (), {"apply": staticmethod(reference)})
        self._batch_type: Any = import_module("specforge.runtime.contracts").TrainBatch

        given, facts = load_file(folder / "features.safetensors"), _facts(folder)
        self.given, self.capture_layers = given, facts["capture_layers"]
        ids, where = given["target_ids"], str(folder / "target")
        self.target = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
        config = transformers.AutoConfig.from_pretrained(where)
        config.update({"num_hidden_layers": 1, "draft_vocab_size": len(ids)})
        self.head = draft.LlamaForCausalLMEagle3(config, attention_backend="sdpa")
        weights = {f"{n}.weight": x for n, x in self._named(given)}
        weights["embed_tokens.weight"] = self.target.get_input_embeddings().weight
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        self.head.load_state_dict(weights)
        self.head.freeze_embedding()
        teacher = heads.TargetHead(where)
        teacher.fc.weight = self.target.lm_head.weight
        teacher.freeze_weights()
        self.strategy = import_module("specforge.training.strategies.base").Eagle3TrainStrategy(
            model.OnlineEagle3Model(self.head, length=facts["steps"], attention_backend="sdpa"), target_head=teacher
        )
        optimizer: Any = import_module("specforge.optimizer").BF16Optimizer
        self.optimizer = optimizer(self.head, lr=facts["lr"], lr_scheduler="constant", warmup_ratio=0.0)

    @staticmethod
    def _named(given: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in given.items():
            if name.startswith("head."):
                yield name.removeprefix("head.").removesuffix(".weight").replace("layers.0.", "midlayer."), weight

    def trained(self) -> Iterator[Tensor]:
        return (p for p in self.head.parameters() if p.requires_grad)

    @torch.no_grad()
    def step_losses(self, mask: str) -> list[float]:
        # Its losses are means over all tokens, masked or not.
        supervised = self.given[f"supervised.{mask}"]
        losses = self.strategy.forward_loss(self._batch(mask, with_target=False)).metrics["plosses"]
        return [float(x) * supervised.numel() / float(supervised.sum()) for x in losses]

    def step(self, mask: str, *, with_target: bool) -> None:
        self.strategy.forward_loss(self._batch(mask, with_target)).loss.backward()
        self.optimizer.step()

    def _batch(self, mask: str, with_target: bool) -> Any:
        tokens, captured, last = (self.given[name] for name in ("tokens", "captured", "last_hidden"))
        if with_target:
            with torch.no_grad():
                found = self.target.model(tokens, output_hidden_states=True, use_cache=False)
            captured = torch.stack([found.hidden_states[k] for k in self.capture_layers], dim=2)
            last = found.last_hidden_state
        # At row t its step k asks for the mask at t + k, and takes the teacher of position t + k + 1.
        supervised = self.given[f"supervised.{mask}"]
        shifted = torch.cat([supervised[:, 1:], torch.zeros_like(supervised[:, :1])], dim=1)
        tensors = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "loss_mask": shifted.long(),
            "hidden_state": captured.flatten(2),
            "target": last,
        }
        names = [str(i) for i in range(len(tokens))]
        return self._batch_type(names, "eagle3", tensors, {"target_repr": "hidden_state"})


TRAINERS: dict[str, type[Bitdraft] | type[SpecForge]] = {"bitdraft": Bitdraft, "specforge": SpecForge}


def serve(make: type[Bitdraft] | type[SpecForge], folder: Path, *, compiled: bool) -> None:
    torch.set_num_threads(1)
    if not compiled:
        torch.compiler.set_stance("force_eager")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    before = mebibytes("VmRSS")
    trainer: Trainer = make(folder)

    def answer(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    answer(
        trained_parameters=sum(p.numel() for p in trainer.trained()),
        first_losses={mask: trainer.step_losses(mask) for mask in _facts(folder)["prompts"]},
        versions={"python": platform.python_version(), **{name: version(name) for name in trainer.packages}},
    )
    for line in sys.stdin:
        mask, states = line.split()
        started, cpu = time.perf_counter(), time.process_time()
        trainer.step(mask, with_target=states == "with_target")
        used, passed = time.process_time() - cpu, time.perf_counter() - started
        answer(cpu_seconds=used, seconds=passed, peak_rss_mib=mebibytes("VmHWM"), rss_before_mib=before)


def mebibytes(what: str) -> float:
    """What Linux says this process holds (``VmRSS``) or has held at most (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def _facts(folder: Path) -> Any:
    return json.loads((folder / "facts.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    serve(TRAINERS[sys.argv[1]], Path(sys.argv[2]), compiled="--compile" in sys.argv[3:])
