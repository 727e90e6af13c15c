"""Every layout, kind and switch: what comes back drafts the same bits and is written again as the same bytes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftContext, DraftHead
from bitdraft.speculators.export import LAYOUTS, export_head
from bitdraft.speculators.load import load_head

Make = Callable[[str], DraftHead]
VLLM_ONLY = [
    "eagle3 first layer",
    "eagle3 one layer",
    "eagle3 six heads",
    "eagle3 norm_before_residual",
    "eagle3 both norms",
    "eagle3 qwen3",
    "eagle3 biases",
    "eagle3 qwen3 biases",
    "eagle3 own embedding",
    "eagle3 narrow",
]
ALL_ENGINES = [
    "eagle3",
    "eagle3 full",
    "eagle3 four layers",
    "eagle3 norm_before_fc",
    "eagle3 fc_norm",
    "eagle3 norm_output",
    "eagle3 low rank",
]
MEDUSA = ["medusa", "medusa own", "medusa bias"]
OURS_ALONE = ["medusa linked", "medusa linked own"]
HELD = [
    *((kind, "eagle3-speculators") for kind in (*ALL_ENGINES, *VLLM_ONLY)),
    *((kind, "eagle3-original") for kind in ALL_ENGINES),
    *((kind, layout) for kind in MEDUSA for layout in ("medusa-vllm", "medusa-original")),
    *((kind, "medusa-original") for kind in OURS_ALONE),
]
every_pair = pytest.mark.parametrize(("kind", "layout"), HELD)


@pytest.fixture(scope="session")
def rounded_in(load_rounded: Callable[[torch.dtype], LowBitTarget]) -> Callable[[torch.dtype], LowBitTarget]:
    loaded: dict[torch.dtype, LowBitTarget] = {}

    def get(dtype: torch.dtype) -> LowBitTarget:
        return loaded.get(dtype) or loaded.setdefault(dtype, load_rounded(dtype))

    return get


@torch.no_grad()
def drafting_logits(head: DraftHead, target: LowBitTarget) -> Tensor:
    """``[2, K, D]`` of a chain of two tokens, whatever they are, behind two prompts of ten."""
    tokens = torch.randint(0, 256, (2, 10), generator=torch.Generator().manual_seed(3))
    states = target.states(tokens, capture=head.capture_layers)
    context = DraftContext(
        states.captured, states.last_hidden, tokens.roll(-1, 1), torch.zeros(2).long(), torch.full((2,), 9)
    )
    state = head.new_state(16, target.new_cache(16))
    logits = [head.first(context, state)]
    following = torch.tensor([[7], [9]])
    logits.append(head.following(state, following, torch.zeros(2, 1).long())[:, 0])
    return torch.stack(logits, dim=1)


@every_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_export_drafts_the_bits_of_the_head(
    make_head_for: Callable[[str, LowBitTarget], DraftHead],
    rounded_in: Callable[[torch.dtype], LowBitTarget],
    tmp_path: Path,
    kind: str,
    layout: str,
    dtype: torch.dtype,
) -> None:
    target = rounded_in(dtype)
    head = make_head_for(kind, target)
    if dtype == torch.bfloat16:  # the target rounds what training left, and so does the file
        for weight in head.parameters():
            weight.data *= 1.001
    export_head(head, target, tmp_path / "head", draft_length=2, layout=layout)
    loaded = load_head(tmp_path / "head", target)
    written = head.multiplied_out().placed(target.device, torch.bfloat16).placed(target.device, dtype)
    mine, its = (drafting_logits(h, target) for h in (written, loaded))
    assert its.dtype == mine.dtype
    assert torch.equal(its, mine)
    assert float(mine.float().std()) > 0.01, "logits that say nothing are easily equal"
    assert loaded.capture_layers == head.capture_layers
    assert torch.equal(loaded.vocab.target_ids, head.vocab.target_ids)


@every_pair
def test_what_was_read_is_written_as_the_same_bytes(
    make_head: Make, rounded: LowBitTarget, tmp_path: Path, kind: str, layout: str
) -> None:
    for head, folder in ((make_head(kind), "first"), (None, "second")):
        export_head(
            head or load_head(tmp_path / "first", rounded), rounded, tmp_path / folder, draft_length=2, layout=layout
        )
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / f).iterdir()} for f in ("first", "second"))
    assert first.keys() == {LAYOUTS[layout].WEIGHTS, "config.json", "manifest.json"}
    assert {name for name in first if first[name] != second.get(name)} == set()


@pytest.mark.parametrize("kind", [*ALL_ENGINES, *MEDUSA])
def test_a_head_goes_from_one_layout_to_another_and_back(
    make_head: Make, rounded: LowBitTarget, tmp_path: Path, kind: str
) -> None:
    head = make_head(kind)
    first, other = (name for name, layout in LAYOUTS.items() if head.kind == layout.KIND)
    for number, layout in enumerate((first, other, first)):
        export_head(head, rounded, tmp_path / str(number), draft_length=2, layout=layout)
        head = load_head(tmp_path / str(number), rounded)
    for name in (LAYOUTS[first].WEIGHTS, "config.json"):
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_the_pairs_are_all_that_the_layouts_hold(make_head: Make) -> None:
    """A layout that refuses a head, or a kind that no pair tries, would go unnoticed."""
    held = []
    for kind in (*ALL_ENGINES, *VLLM_ONLY, *MEDUSA, *OURS_ALONE):
        head = make_head(kind)
        for name, layout in LAYOUTS.items():
            if head.kind != layout.KIND:
                continue
            try:
                layout.check(head)
            except ValueError:
                continue
            held.append((kind, name))
    assert sorted(held) == sorted(HELD)
