"""Medusa-2: adapters in the target, trained along with its heads."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny import save_tiny_target
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from bitdraft.data.capture import capture_pack
from bitdraft.data.chat import Example
from bitdraft.data.packing import make_pack
from bitdraft.quant.fake import fake
from bitdraft.quant.linear import LowBitLinear
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.target import LowBitTarget, load_target
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.export import MANIFEST
from bitdraft.speculators.medusa import MedusaConfig, MedusaHead
from bitdraft.speculators.vocab import DraftVocab
from bitdraft.train import run as run_module
from bitdraft.train.adapted_head import AdaptedHead, load_adapters, trained_head
from bitdraft.train.adapted_target import TargetAdapters, adapted_layers, check_adaptable, drift_of
from bitdraft.train.checkpoint import newest_checkpoint
from bitdraft.train.config import (
    AcceptanceConfig,
    OptimConfig,
    RunConfig,
    SelectionConfig,
    StatesConfig,
    TargetLoraConfig,
)
from bitdraft.train.environment import Environment
from bitdraft.train.exporting.adapter import FOLDER, read_adapter
from bitdraft.train.exporting.config import ExportConfig
from bitdraft.train.exporting.request import checked_request
from bitdraft.train.journal import Journal, read_metrics
from bitdraft.train.loss_terms import LossConfig
from bitdraft.train.measuring.drafters import DrafterSpec
from bitdraft.train.module import TrainedHead
from bitdraft.train.run import run
from bitdraft.train.states import StateSource, Supervision

K = 3
LENGTHS = [(6, 5), (2, 3), (9, 1), (1, 14), (4, 8)]  # tokens of prompt and answer
HADAMARD = Recipe("hadamard", (Rule("*.layers.*", "mxfp4-even", "mxfp4-rceil", transform="hadamard"),))
MakeConfig = Callable[..., RunConfig]
ONE_PROCESS: Any = SimpleNamespace(distributed_type="NO")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with two layers."""
    return save_tiny_target(tmp_path_factory.mktemp("small") / "target", num_hidden_layers=2)


def fresh(folder: Path, recipe: Recipe | str, dtype: torch.dtype = torch.float32, **options: Any) -> LowBitTarget:
    """A target of one's own: adapters change the model that they are put into."""
    chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
    return load_target(str(folder), chosen, dtype=dtype, compile_quantizer=options.get("compiled", "off"))


def with_adapters(target: LowBitTarget, *, learned: float = 0.0, **settings: Any) -> TargetAdapters:
    """``learned``: the size of what stands in their second factors, which are zero at first."""
    adapters = TargetAdapters(target, TargetLoraConfig(**{"rank": 4, **settings}), seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapters.parameters.items():
        if "lora_B" in name and learned:
            parameter.data = (learned * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
    return adapters


def examples() -> list[Example]:
    generator = torch.Generator().manual_seed(8)

    def random(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 256, (n,), generator=generator).tolist())

    return [Example(f"e{i}", "", random(p), random(a)) for i, (p, a) in enumerate(LENGTHS)]


def make_head(target: LowBitTarget, std: float = 0.0) -> DraftHead:
    torch.manual_seed(0)
    head = MedusaHead.from_target(MedusaConfig(heads=K), target, DraftVocab.full(target.vocab_size))
    for weight in head.parameters():
        nn.init.normal_(weight, std=std)
    return head.float()


def supervised(target: LowBitTarget, chosen: list[Example] | None = None) -> Supervision:
    texts = chosen or examples()
    source = StateSource(target, texts, (), K, StatesConfig(mode="online"), uses=1, cache=Path())
    return source.supervision(range(len(texts)), dict(enumerate([1.0, 0.5, 2.0, 1.0, 0.25])))


def module_of(adapters: TargetAdapters, head: DraftHead) -> TrainedHead:
    return trained_head(head, adapters.target.logits_of(head.vocab.target_ids), LossConfig(), adapters)


def ids_of(target: LowBitTarget) -> Tensor:
    return torch.arange(2, 40).view(2, 19).to(target.device)


def logits_of(adapters: TargetAdapters) -> Tensor:
    """Of the adapted target."""
    with adapters.on():
        return adapters.target.logits(adapters.target.states(ids_of(adapters.target)).last_hidden)


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4", "none", "mxfp4+kvfp8", HADAMARD], ids=str)
def test_adapters_that_learned_nothing_change_nothing(small: Path, recipe: Recipe | str) -> None:
    target = fresh(small, recipe)
    before = target.logits(target.states(ids_of(target)).last_hidden)
    adapters = with_adapters(target)
    assert len(adapters.layers) == 2 * 7
    assert torch.equal(logits_of(adapters), before)
    moved = with_adapters(fresh(small, recipe), learned=0.1)
    assert not torch.allclose(logits_of(moved), before, atol=1e-2)
    off = moved.target.logits(moved.target.states(ids_of(target)).last_hidden)
    assert torch.equal(off, before), "off unless asked for"


def test_layers_that_share_an_input_still_quantize_it_once(small: Path) -> None:
    plain, adapters = fresh(small, "mxfp4"), with_adapters(fresh(small, "mxfp4"), learned=0.1)
    counts = []
    for target in (plain, adapters.target):
        before = target.applied.quantizer.quantizations
        with adapters.on():
            target.states(ids_of(target))
        counts.append(target.applied.quantizer.quantizations - before)
    assert counts == [2 * 4] * 2, "q, k and v; o; gate and up; down"


@pytest.mark.parametrize("recipe", ["mxfp4", "fp8"])
def test_one_layer_and_its_gradients_are_the_formulas(small: Path, recipe: str) -> None:
    target = fresh(small, recipe)
    adapters = with_adapters(target, learned=0.3, alpha=10)
    name = "model.layers.1.mlp.down_proj"
    layer = adapters.layers[name]
    base = layer.get_base_layer()
    assert isinstance(base, LowBitLinear) and base.activations is not None
    a, b = (adapters.parameters[f"{name}.{side}.weight"] for side in ("lora_A", "lora_B"))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 5, 128, generator=generator).requires_grad_()
    w = torch.randn(2, 5, 64, generator=generator)
    with adapters.on():
        y = layer(x)
    (y * w).sum().backward()

    weight, scale = base.dequantized(), 10 / 4
    with torch.no_grad():
        expected = fake(x, base.activations) @ weight.T + scale * x @ a.T @ b.T
        rows, grads = x.flatten(0, 1), w.flatten(0, 1)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(b.grad, scale * grads.T @ (rows @ a.T), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.grad, scale * (grads @ b).T @ rows, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(x.grad, w @ weight + scale * w @ b @ a, rtol=1e-4, atol=1e-4)  # straight through
    assert base.weight.grad is None


@pytest.mark.parametrize("recipe", ["mxfp4a16", "none"])
def test_the_gradient_of_the_whole_loss_is_its_slope(small: Path, recipe: str) -> None:
    """In fp64, through all layers: along a direction of the adapters the loss changes as the gradient says."""
    target = fresh(small, recipe, torch.float64)
    adapters = with_adapters(target, learned=0.02, keep=3.0)
    for parameter in adapters.parameters.values():
        parameter.data = parameter.data.double()
    module, supervision = module_of(adapters, make_head(target, std=0.05)), supervised(target)
    module(supervision, 7.0).loss.backward()
    generator = torch.Generator().manual_seed(4)
    direction = {n: torch.randn(p.shape, generator=generator).double() for n, p in adapters.parameters.items()}
    slope = 0.0
    for name, parameter in adapters.parameters.items():
        assert parameter.grad is not None
        slope += float((parameter.grad * direction[name]).sum())

    def at(step: float) -> float:
        for name, parameter in adapters.parameters.items():
            parameter.data += step * direction[name]
        loss = float(module(supervision, 7.0).loss.detach())
        for name, parameter in adapters.parameters.items():
            parameter.data -= step * direction[name]
        return loss

    assert (at(1e-3) - at(-1e-3)) / 2e-3 == pytest.approx(slope, rel=1e-2)
    every = [p.grad for p in adapters.parameters.values()]
    assert all(g is not None and g.abs().max() > 0 for g in every), "it reaches every layer"


def test_what_keeps_the_target_is_the_divergence_from_its_own_distribution(small: Path) -> None:
    target = fresh(small, "mxfp4")
    losses = {}
    for keep in (0.0, 5.0):
        adapters = with_adapters(fresh(small, "mxfp4"), learned=0.05, keep=keep)
        losses[keep] = float(module_of(adapters, make_head(target))(supervised(adapters.target), 11.0).loss.detach())
    divergences, weights = [], [1.0, 0.5, 2.0, 1.0, 0.25]
    for example, weight in zip(examples(), weights, strict=True):
        tokens = torch.tensor([[*example.prompt, *example.answer]])
        first = len(example.prompt) - 1
        p = target.logits(target.states(tokens).last_hidden[0, first:-1]).log_softmax(-1)
        with adapters.on():
            q = adapters.target.logits(adapters.target.states(tokens).last_hidden[0, first:-1]).log_softmax(-1)
        divergences.append(weight * float((p.exp() * (p - q)).sum()))
    assert losses[5.0] - losses[0.0] == pytest.approx(5 * math.fsum(divergences) / 11, rel=1e-3)
    drift = drift_of(adapters, examples())
    unweighted = math.fsum(d / w for d, w in zip(divergences, weights, strict=True))
    assert drift.positions == 31
    assert drift.kl_to_original == pytest.approx(unweighted / 31, rel=1e-3)
    assert 0 < drift.top_1_agreement < 1
    at_first = drift_of(with_adapters(fresh(small, "mxfp4")), examples())
    assert at_first.kl_to_original == pytest.approx(0, abs=1e-6)
    assert at_first.top_1_agreement == 1


def test_how_a_step_is_cut_into_packs_does_not_change_its_gradient(small: Path) -> None:
    found = []
    for cuts in ([[0, 1, 2, 3, 4]], [[3, 0], [4, 1, 2]]):
        adapters = with_adapters(fresh(small, "mxfp4a16"), learned=0.05, keep=2.0)
        module = module_of(adapters, make_head(adapters.target, std=0.05))
        source = StateSource(adapters.target, examples(), (), K, StatesConfig(mode="memory"), uses=9, cache=Path())
        for cut in cuts:
            module(source.supervision(cut), 31.0).loss.backward()
        found.append({name: p.grad for name, p in module.named_parameters()})
    assert found[0].keys() == found[1].keys() and len(found[0]) == K + 2 * 2 * 7
    for name, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][name], rtol=1e-3, atol=1e-5, msg=name)


def learned_together(folder: Path, *, steps: int = 40, **settings: Any) -> tuple[float, TargetAdapters, dict[str, Any]]:
    """The heads' loss after some steps, their target's adapters, and the target's own tensors before."""
    target = fresh(folder, "mxfp4")
    own = {name: x.clone() for name, x in target.model.state_dict().items()}
    adapters = with_adapters(target, **settings)
    module, supervision = module_of(adapters, make_head(target)), supervised(target)
    groups = [{**group, "lr": 3e-3 * group["share"]} for group in module.groups]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    for _ in range(steps):
        module(supervision, 31.0).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    inputs = supervision.states
    if adapters:
        inputs = replace(inputs, last_hidden=adapters.last_hidden(supervision.pack).detach())
    return float(module.losses(supervision, 31.0, inputs).loss.detach()), adapters, own


def test_heads_learn_more_with_their_target_than_from_it_and_keep_holds_it_back(small: Path) -> None:
    frozen, _, _ = learned_together(small, rank=0)
    free, moved, own = learned_together(small, keep=0.0, lr_share=1.0)
    held, kept, _ = learned_together(small, keep=1000.0, lr_share=1.0)
    assert free < 0.96 * frozen  # of which most is the entropy of what they are taught
    assert drift_of(moved, examples()).kl_to_original > 0.5
    assert drift_of(kept, examples()).kl_to_original < 0.02
    assert free < held
    now = {name.replace(".base_layer.", "."): x for name, x in moved.target.model.state_dict().items()}
    assert {name for name in now if "lora" not in name} == own.keys()
    assert all(torch.equal(now[name], x) for name, x in own.items()), "the target's own weights never learn"


def test_the_adapter_has_a_learning_rate_of_its_own(small: Path) -> None:
    still, adapters, _ = learned_together(small, steps=3, lr_share=0.0)
    start = with_adapters(fresh(small, "mxfp4"))
    assert all(torch.equal(p, start.parameters[name]) for name, p in adapters.parameters.items())
    untouched, _, _ = learned_together(small, steps=3, rank=0)
    assert still == pytest.approx(untouched, rel=1e-5)


def test_a_run_without_adapters_is_as_it_was(small: Path) -> None:
    target = fresh(small, "mxfp4")
    names = [name for name, _ in target.model.named_modules()]
    state = torch.get_rng_state()
    adapters = TargetAdapters(target, TargetLoraConfig(), seed=5)
    assert not adapters and torch.equal(torch.get_rng_state(), state)
    assert [name for name, _ in target.model.named_modules()] == names
    assert type(module_of(adapters, make_head(target))) is TrainedHead


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if k != "tokens_per_second"} for line in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def medusa_2(
    make_config: MakeConfig, environment: Environment, small: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("medusa-2") / "run"
    return run(medusa_2_config(make_config, folder, small), environment).folder


def medusa_2_config(make_config: MakeConfig, folder: Path, small: Path) -> RunConfig:
    learned = TargetLoraConfig(rank=4, keep=1.0)
    return make_config(folder, head="medusa", target=str(small), target_quant="mxfp4", target_lora=learned)


def test_a_run_exports_the_adapter_beside_the_heads_and_says_so(medusa_2: Path, small: Path) -> None:
    export = medusa_2 / "export"
    sums = json.loads((export / MANIFEST).read_text(encoding="utf-8"))["sha256"]
    assert {f"{FOLDER}/adapter_config.json", f"{FOLDER}/adapter_model.safetensors", f"{FOLDER}/README.md"} <= set(sums)
    measured = json.loads((medusa_2 / "acceptance.json").read_text(encoding="utf-8"))
    told = json.loads((export / "config.json").read_text(encoding="utf-8"))["bitdraft"]["target_adapter"]
    assert measured["target_adapter"] == told
    assert (told["rank"], told["keep"], told["layers"], told["folder"]) == (4, 1.0, 14, FOLDER)
    assert 0 < told["kl_to_original"] < 1 and 0.5 < told["top_1_agreement"] <= 1
    assert [r["lossless_failed"] for r in measured["results"]] == [0, 0]

    adapters = read_adapter(fresh(small, "mxfp4"), export)
    saved = newest_checkpoint(medusa_2 / "checkpoints")
    assert saved is not None
    trained = TargetAdapters(fresh(small, "mxfp4"), TargetLoraConfig(rank=4), seed=9)
    load_adapters(trained, replace(saved, path=saved.path.with_name(best_step(medusa_2))))
    for name, parameter in trained.parameters.items():
        assert torch.equal(parameter.to(torch.bfloat16).float(), adapters.parameters[name]), name
    assert any(p.abs().max() > 0 for name, p in adapters.parameters.items() if "lora_B" in name)


def best_step(folder: Path) -> str:
    saved = newest_checkpoint(folder / "checkpoints")
    assert saved is not None
    best = max(saved.history, key=lambda c: (c.acceptance_length, c.step))
    return f"step-{best.step:06d}"


def test_a_killed_run_resumes_bit_for_bit_with_its_adapter(
    medusa_2: Path,
    make_config: MakeConfig,
    environment: Environment,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = medusa_2_config(make_config, tmp_path / "run", small)
    write = Journal.write

    def write_and_die(self: Journal, done: int, content: dict[str, Any]) -> None:
        write(self, done, content)
        if done == 4:
            raise RuntimeError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "write", write_and_die)
        with pytest.raises(RuntimeError, match="power cut"):
            run(config, environment)
    switched: dict[str, list[bool]] = {}

    def watch(name: str, place: int) -> None:
        function = getattr(run_module, name)

        def watched(*given: Any, **named: Any) -> Any:
            layer = given[place].model.get_submodule("model.layers.0.mlp.up_proj")
            switched.setdefault(name, []).append(not layer.disable_adapters)
            return function(*given, **named)

        monkeypatch.setattr(run_module, name, watched)

    watch("acceptance_of", 0)
    watch("export_checked", 1)
    watch("measure", 0)
    run(replace(config, resume=True), environment)
    measured_on_the_adapted_target = {"acceptance_of": [True], "export_checked": [True], "measure": [True]}
    assert switched == measured_on_the_adapted_target
    assert metrics(tmp_path / "run") == metrics(medusa_2)
    for file in ("module.safetensors", "optimizer.safetensors"):
        mine, its = (load_file(f / "checkpoints" / "step-000006" / file) for f in (tmp_path / "run", medusa_2))
        assert mine.keys() == its.keys() and any("lora_B" in name for name in mine)
        assert all(torch.equal(mine[name], its[name]) for name in its)
    written = [(f / "export" / FOLDER / "adapter_model.safetensors").read_bytes() for f in (tmp_path / "run", medusa_2)]
    assert written[0] == written[1]


def test_a_share_of_nothing_leaves_the_target_of_a_run_as_it_is(
    make_config: MakeConfig, environment: Environment, small: Path, tmp_path: Path
) -> None:
    config = replace(
        medusa_2_config(make_config, tmp_path / "run", small),
        target_lora=TargetLoraConfig(rank=4, lr_share=0.0),
        selection=SelectionConfig(every=0),
        acceptance=AcceptanceConfig(draft_lengths=()),
    )
    export = run(config, environment).export
    told = json.loads((export / "config.json").read_text(encoding="utf-8"))["bitdraft"]["target_adapter"]
    assert told["kl_to_original"] == pytest.approx(0, abs=1e-6)
    weights = load_file(export / FOLDER / "adapter_model.safetensors")
    assert all(not w.any() for name, w in weights.items() if "lora_B" in name)


def test_a_trained_run_without_its_export_writes_the_same_adapter(
    medusa_2: Path, make_config: MakeConfig, environment: Environment, small: Path, tmp_path: Path
) -> None:
    shutil.copytree(medusa_2, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "export")
    (tmp_path / "run" / "acceptance.json").unlink()
    run(replace(medusa_2_config(make_config, tmp_path / "run", small), resume=True), environment)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        mine, its = (folder / "export" / FOLDER / file for folder in (tmp_path / "run", medusa_2))
        assert mine.read_bytes() == its.read_bytes()


def test_the_exported_adapter_is_one_that_peft_loads(
    make_config: MakeConfig, environment: Environment, small: Path, tmp_path: Path
) -> None:
    """Beside a target in high precision, which transformers and peft load as any other."""
    longer = OptimConfig(steps=24, batch_tokens=30, lr=1e-2)  # so that some drafts are accepted
    config = replace(medusa_2_config(make_config, tmp_path / "run", small), target_quant="none", optim=longer)
    export = run(config, environment).export
    adapters = read_adapter(fresh(small, "none"), export)
    plain = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    peft = PeftModel.from_pretrained(plain, export / FOLDER).eval()
    with torch.no_grad():
        theirs = peft(input_ids=ids_of(adapters.target)).logits
        alone = AutoModelForCausalLM.from_pretrained(small)(input_ids=ids_of(adapters.target)).logits
    torch.testing.assert_close(logits_of(adapters), theirs, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(theirs, alone, atol=1e-3)


@pytest.mark.slow
def test_a_compiled_quantizer_gives_the_same_states_and_gradients(small: Path) -> None:
    found = []
    for compiled in ("off", "on"):
        adapters = with_adapters(fresh(small, "mxfp4", compiled=compiled), learned=0.05)
        long = [Example("long", "", (5,) * 20, tuple(range(60, 260)) * 3)]  # enough of them to be compiled
        states = adapters.last_hidden(make_pack(long))
        states.square().sum().backward()
        found.append((states.detach(), [p.grad for p in adapters.parameters.values()]))
    assert torch.equal(found[0][0], found[1][0])
    for mine, its in zip(found[0][1], found[1][1], strict=True):
        assert mine is not None and its is not None and torch.equal(mine, its)


def test_the_states_that_teach_are_the_original_ones(small: Path) -> None:
    plain = fresh(small, "mxfp4")
    adapters = with_adapters(fresh(small, "mxfp4"), learned=0.2)
    mine, its = (capture_pack(t, examples(), ()).last_hidden for t in (adapters.target, plain))
    assert torch.equal(mine, its)
    pack = make_pack(examples())
    with adapters.on():
        adapted = capture_pack(adapters.target, examples(), ()).last_hidden
    torch.testing.assert_close(adapters.last_hidden(pack), adapted)


def test_targets_that_cannot_be_trained_along_are_refused(small: Path, tmp_path: Path) -> None:
    wanted = TargetLoraConfig(rank=4)
    target = fresh(small, "mxfp4")
    check_adaptable(wanted, target, ONE_PROCESS)
    for engine in ("FSDP", "DEEPSPEED"):
        processes: Any = SimpleNamespace(distributed_type=engine)
        check_adaptable(TargetLoraConfig(), target, processes)
        with pytest.raises(ValueError, match="not cut up over processes: launch one process or DDP"):
            check_adaptable(wanted, target, processes)
    low = fresh(small, Recipe("all", (Rule("*", "mxfp4-even"),)))
    with pytest.raises(ValueError, match=r"the output head of .* is in low bit, .* a recipe that leaves lm_head alone"):
        check_adaptable(wanted, low, ONE_PROCESS)
    capped = fresh(save_tiny_target(tmp_path / "capped"), "none")
    capped.config.final_logit_softcapping = 5.0
    with pytest.raises(ValueError, match="scaled or capped"):
        check_adaptable(wanted, capped, ONE_PROCESS)
    for layer in target.decoder.layers:
        layer.self_attn, layer.mlp = nn.Identity(), nn.Identity()
    with pytest.raises(ValueError, match=r"has none of the layers that get adapters \(q_proj, "):
        adapted_layers(target)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": -1}, "target_lora.rank must be at least 0, got -1"),
        ({"alpha": 0}, "target_lora.alpha must be at least 1, got 0"),
        ({"keep": -0.5}, "target_lora.keep must be finite and at least 0"),
        ({"lr_share": float("inf")}, "target_lora.lr_share must be finite and at least 0"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TargetLoraConfig(**settings)


def test_only_medusa_heads_are_trained_with_their_target_and_on_one_device() -> None:
    with pytest.raises(ValueError, match="with Medusa heads only: give --head medusa"):
        RunConfig(target_lora=TargetLoraConfig(rank=1))
    with pytest.raises(ValueError, match="lies on one device: leave out device_map"):
        RunConfig(head="medusa", target_lora=TargetLoraConfig(rank=1), device_map="auto")


def test_a_head_with_an_adapter_is_not_taken_for_one_of_the_target_alone(medusa_2: Path, small: Path) -> None:
    export = medusa_2 / "export"
    with pytest.raises(
        ValueError, match="was trained along with its target, and drafts for the target with the adapter"
    ):
        DrafterSpec(str(export)).load(fresh(small, "mxfp4"), lambda *_: fresh(small, "mxfp4"))
    with pytest.raises(ValueError, match="was trained along with its target"):
        checked_request(ExportConfig(head=export, out=medusa_2 / "out", target=str(small)))


def test_an_adapter_of_another_target_or_a_missing_one_is_refused(medusa_2: Path, tmp_path: Path) -> None:
    other = fresh(save_tiny_target(tmp_path / "other", hidden_size=32, head_dim=8), "none")
    with pytest.raises(ValueError, match=r"adapter holds no adapter for .*other"):
        read_adapter(other, medusa_2 / "export")
    with pytest.raises(ValueError, match="holds no adapter for"):
        read_adapter(other, tmp_path)


def test_adapters_are_part_of_the_trained_module(small: Path) -> None:
    adapters = with_adapters(fresh(small, "mxfp4"))
    module = module_of(adapters, make_head(adapters.target))
    assert isinstance(module, AdaptedHead)
    inside = {id(p) for p in module.parameters() if p.requires_grad}
    assert inside == {id(p) for group in module.groups for p in group["params"]}
    assert inside >= {id(p) for p in adapters.parameters.values()}
    assert not any("base_layer" in name for name in module.state_dict())
