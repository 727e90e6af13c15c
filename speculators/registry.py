"""Draft heads by name. A new head is a file beside this one and a line here."""

from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.medusa import MedusaHead

HEADS: dict[str, type[DraftHead]] = {head.kind: head for head in (Eagle3Head, MedusaHead)}
