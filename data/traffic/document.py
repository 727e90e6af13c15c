"""``report.json``: everything that is known of a matching, as plain data."""

from typing import Any

from bitdraft.data.conversation import Conversation
from bitdraft.data.traffic.groups import Group, prompt_of
from bitdraft.data.traffic.match import Matching
from bitdraft.data.traffic.weighing import MatchSettings

Document = dict[str, Any]
"""What ``scripts/match_traffic.py`` writes as ``report.json``."""
_EXAMPLES = 10
_PROMPT = 300  # characters


def document(found: Matching, settings: MatchSettings, about: Document) -> Document:
    """Everything that is measured. ``about``: command, date, sources, times, and whatever else the caller knows."""
    done, seen = found.finished, found.survey
    kept = seen.records - len(seen.dropped)
    distances = {
        f"{name}_{when}": getattr(measure, when)
        for name, measure in found.measures.items()
        for when in ("before", "after", "own")
    }
    mmd_p = {"mmd_p": distances["mmd_p_after"]}
    return {
        "version": 1,
        **about,
        "seed": settings.seed,
        "records": seen.records,
        "dropped": {
            "count": len(seen.dropped),
            "examples": [_pair(*pair) for _, pair in sorted(seen.dropped.items())[:_EXAMPLES]],
        },
        "traffic_records": {part: len(getattr(found.split, part)) for part in ("fit", "tune", "test")},
        "traffic_groups_of_near_duplicates": found.split.groups,
        "traffic_largest_group_of_near_duplicates": found.split.largest_group,
        "answers": {
            "read": found.answers,
            "weights_count_tokens": found.by_tokens,
            "pool_unanswered": seen.unanswered,
            "pool_empty": seen.empty_answers,
            "pool_cut": seen.cut_answers,
            "traffic_unanswered": found.traffic_unanswered,
            "traffic_empty": found.traffic_empty_answers,
            "traffic_cut": found.traffic_cut_answers,
        },
        "ess_fraction": done.ess_fraction,
        "ess": done.ess_fraction * kept,
        "ess_fraction_untempered": done.ess_fraction_untempered,
        "ess_untempered": done.ess_fraction_untempered * kept,
        "floor": settings.floor,
        "temper": done.temper,
        "beta": found.beta,
        "uniform": done.uniform,
        "clip": done.clip,
        "clipped": done.clipped,
        "weight_largest": float(found.weights.max()),
        **distances,
        **mmd_p,
        "mmd_size": found.mmd_size,
        "unmatched": found.unmatched,
        "clusters": found.cluster_count,
        "clusters_without_pool": [g.number for g in found.groups if not g.pool_records],
        "languages": {
            name: dict(zip(("traffic", "before", "after"), shares, strict=True))
            for name, shares in found.languages.items()
        },
        "groups": [_group(g) for g in sorted(found.groups, key=lambda g: (-g.weight, g.number))],
    }


def _group(group: Group) -> Document:
    return {
        "number": group.number,
        "name": group.name,
        "pool_records": group.pool_records,
        "traffic_records": group.traffic_records,
        "traffic_share": group.traffic_share,
        "share_before": group.share_before,
        "share_after": group.share_after,
        "weight": group.weight,
        "prompts": [shortened(p, _PROMPT) for p in group.prompts],
    }


def _pair(dropped: Conversation, test: Conversation) -> Document:
    prompts = {"prompt": shortened(prompt_of(dropped), _PROMPT), "test_prompt": shortened(prompt_of(test), _PROMPT)}
    return {"place": dropped.source, "test_place": test.source, **prompts}


def shortened(text: str, most: int) -> str:
    """On one line, without control characters, at most so many characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"
