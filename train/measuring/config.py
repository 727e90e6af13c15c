"""What a measurement of acceptance is told. Every field's docstring is its ``--help``."""

from dataclasses import dataclass
from typing import Literal

from bitdraft.speculators.decode import Rule
from bitdraft.speculators.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """How acceptance is measured."""

    draft_length: tuple[int, ...] = (3, 4, 5)
    """Drafted tokens per pass; of a tree, its depth."""
    tree: Literal["none", "static", "dynamic"] = "none"
    """Chains; a tree of a fixed shape; or EAGLE-2's trees, which follow the drafter's probabilities."""
    tree_nodes: int = 16
    """Drafted tokens per pass of a tree."""
    tree_width: int = 4
    """Dynamic trees: nodes that are expanded at each depth, and tokens behind each."""
    tree_widths: tuple[int, ...] = ()
    """Static trees: every combination of so many best tokens at each depth. By default the tree of `--tree-nodes`
    nodes that fits the head's accuracies on the traffic prompts."""
    temperature: tuple[float, ...] = (0.0,)
    """0 is greedy; several are measured one after the other."""
    top_p: float = 1.0
    top_k: int = 0
    drafts: Literal["sampled", "greedy"] = "sampled"
    """Above temperature 0: draw drafts from the drafter's distribution, or take its most probable tokens."""
    typical: bool = False
    """Medusa's typical acceptance instead of speculative sampling. Lossy: the output's distribution changes."""
    batch_size: tuple[int, ...] = (48,)
    """Prompts decoded at once; several are measured one after the other."""
    max_new_tokens: int = 64
    check: int = 8
    """Prompts of each set whose greedy answers are compared with plain decoding."""
    plain: bool = True
    """Also decode every prompt without drafts, for the speedup."""
    bounds: bool = True
    """Also compare the served target with the 16-bit one: what a perfect 16-bit head could reach."""
    confidence: bool = False
    """Calibrate the drafter's confidence on the traffic prompts and report how far it can be trusted (chains)."""
    stop: Literal["never", "threshold", "cost"] = "never"
    """End drafts early: below `--stop-threshold`, or where they cost more than they promise."""
    stop_threshold: float = 0.3
    """Least calibrated probability that a draft and all before it are accepted."""
    thinking: Literal["on", "off"] | None = None
    """Switch the chat template's thinking mode; by default the template decides."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.draft_length or min(self.draft_length) < 1:
            raise ValueError("--draft-length needs numbers of at least 1")
        if not self.batch_size or min(self.batch_size) < 1:
            raise ValueError("--batch-size needs numbers of at least 1")
        for name in ("max_new_tokens", "tree_nodes", "tree_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        if self.tree_widths and self.tree != "static":
            raise ValueError("--tree-widths is for --tree static")
        if self.tree_widths and self.draft_length != (len(self.tree_widths),):
            raise ValueError(f"--tree-widths gives the tree's depth: give --draft-length {len(self.tree_widths)}")
        if self.seed < 0:
            raise ValueError(f"--seed must be at least 0, got {self.seed}")
        if self.tree != "none" and (self.confidence or self.stop != "never"):
            raise ValueError("--confidence and --stop are for chains: leave out --tree")
        if not 0 < self.stop_threshold <= 1:
            raise ValueError(f"--stop-threshold must lie in (0, 1], got {self.stop_threshold}")
        for temperature in self.temperature:  # refuses what sampling refuses
            Rule(sampling=self.sampling(temperature), typical=self.typical)

    @property
    def tree_settings(self) -> str:
        """What else decides the tree; empty for chains."""
        if self.tree == "none":
            return ""
        if self.tree_widths:
            return f"widths {' '.join(map(str, self.tree_widths))}"
        return f"{self.tree_nodes} nodes" + (f", width {self.tree_width}" if self.tree == "dynamic" else "")

    def sampling(self, temperature: float) -> Sampling:
        return Sampling(temperature=temperature, top_p=self.top_p, top_k=self.top_k)
