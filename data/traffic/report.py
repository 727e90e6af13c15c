"""``report.json`` for a person: Markdown, which reads well in a terminal too."""

import re
import unicodedata
from collections.abc import Sequence

from bitdraft.data.traffic.document import Document, shortened

_SHOWN = 10
_THIN = 0.5  # of its share of the traffic: a group that the weighted pool fills less is named
_HOPELESS = 0.5  # share of the traffic that is lacking
_BARE = 0.05  # of its share of the traffic: a group of which the pool has less has next to nothing in it
_LEAST = 0.005  # share of the traffic from which a language or a thin group is named
_CELL = 70  # characters of a prompt in a table


def markdown(report: Document) -> str:
    """The whole report."""
    parts = report["traffic_records"]
    traffic = sum(parts.values())
    lines = [
        "# The pool, weighted to look like the traffic",
        "",
        f"{report['records']:,} pool records, {traffic:,} records of traffic: {parts['fit']:,} to fit the weights, "
        f"{parts['tune']:,} to choose how far they go, {parts['test']:,} to measure them on (`test.jsonl`).",
        "",
        *_verdict(report),
        "",
        "## How far from the traffic",
        "",
        *_distances(report),
        "",
        "Measured on the traffic's test split. The last column compares that split with the fit split, another sample "
        "of the same traffic: about what the best weights can reach. KL of n-grams also grows as samples shrink.",
        "",
        "## Languages",
        "",
        *_languages(report),
        "",
        *_groups(report),
        *_missing(report),
        "## Left out",
        "",
        *_left_out(report),
        "",
        "## How it was made",
        "",
        *_settings(report),
    ]
    return "\n".join(lines) + "\n"


def _verdict(report: Document) -> list[str]:
    kept, share, size = report["records"] - report["dropped"]["count"], report["ess_fraction"], report["ess"]
    lines = []
    if report["unmatched"] >= _HOPELESS:
        lines.append(
            "- **The pool holds too little of this traffic: weights cannot make up for it.** Add records like those "
            "under *Traffic that the weighted pool does not fill*, and match again."
        )
    lines.append(
        f"- **Effective sample size: {share:.1%} of the pool, {size:,.0f} records.** Training on the weighted pool is "
        f"as noisy as training on {size:,.0f} records that all count the same; standard errors are "
        f"{share**-0.5:.2f} times those of all {kept:,}."
    )
    if report["temper"] < 1:
        lines.append(
            f"- **The match is not complete, to keep that many.** A full match would leave "
            f"{report['ess_fraction_untempered']:.1%}, {report['ess_untempered']:,.0f} effective records; weights were "
            f"raised to the power {report['temper']:.2f} instead, so that {report['floor']:.0%} are left. A lower "
            "`--floor` matches more closely and leaves fewer; more records like the raised groups help both."
        )
    lines.append(
        f"- **The weighted pool lacks {report['unmatched']:.1%} of the traffic**, counted by groups"
        f"{'' if report['unmatched'] < 0.1 else ': the groups below say which'}."
    )
    lines += [f"- **{said}**" for said in _absent(report)]
    gap = report["auc_after"] - max(report["auc_own"], 0.5)
    if gap <= 0.05:
        judged = "what is left is about what two samples of the traffic show"
    else:
        judged = "there are differences that the weights do not remove"
    lines.append(
        f"- A classifier tells the weighted pool from the traffic with an AUC of {report['auc_after']:.2f} "
        f"({report['auc_before']:.2f} before, {report['auc_own']:.2f} between two samples of the traffic): {judged}."
    )
    return lines


def _absent(report: Document) -> list[str]:
    """What the pool does not hold, in plain words."""
    said = []
    for name, shares in report["languages"].items():
        if name != "none" and shares["traffic"] >= 0.01 and shares["before"] < 0.1 * shares["traffic"]:
            held = f"only {_percent(shares['before'])} of the pool is" if shares["before"] else "no pool record is"
            said.append(f"{shares['traffic']:.1%} of the traffic is in the language '{name}', and {held}.")
    bare = [g for g in report["groups"] if g["share_before"] < _BARE * g["traffic_share"]]
    if (share := sum(g["traffic_share"] for g in bare)) >= 0.01:
        records, groups = sum(g["pool_records"] for g in bare), "1 group" if len(bare) == 1 else f"{len(bare)} groups"
        said.append(
            f"{share:.1%} of the traffic is in {groups} of which the pool has {records or 'no'} "
            f"{'record' if records < 2 else 'records'}: what is nearest is raised in their place."
        )
    return said


def _distances(report: Document) -> list[str]:
    rows = (
        ("AUC of a classifier (0.5: not told apart)", "auc", "{:.3f}"),
        ("KL(traffic ‖ pool) by group, nats", "kl", "{:.3f}"),
        ("total variation by group", "tv", "{:.3f}"),
        ("KL(traffic ‖ pool) of hashed n-grams, nats", "ngram_kl", "{:.3f}"),
        ("total variation of hashed n-grams", "ngram_tv", "{:.3f}"),
        (f"maximum mean discrepancy², {report['mmd_size']} records a side", "mmd", "{:.4f}"),
        ("its permutation p-value", "mmd_p", "{:.3f}"),
    )
    return aligned(
        ["", "before", "after", "two samples of the traffic"],
        [
            [label, *(form.format(report[f"{key}_{when}"]) for when in ("before", "after", "own"))]
            for label, key, form in rows
        ],
    )


def _languages(report: Document) -> list[str]:
    shown = [
        [
            name if name != "none" else "none that is known",
            *(_percent(shares[w]) for w in ("traffic", "before", "after")),
        ]
        for name, shares in report["languages"].items()
        if max(shares.values()) >= _LEAST
    ]
    return aligned(["", "traffic", "pool before", "pool after"], shown)


def _groups(report: Document) -> list[str]:
    held = [g for g in report["groups"] if g["pool_records"]]
    raised = [g for g in held if g["weight"] > 1][:_SHOWN]
    lowered = [g for g in reversed(held) if g["weight"] < 1][:_SHOWN]
    lines = []
    for title, groups in (("Most raised groups", raised), ("Most lowered groups", lowered)):
        if groups:
            lines += [f"## {title}", "", *_table(groups), ""]
    return lines


def _missing(report: Document) -> list[str]:
    thin = [
        g
        for g in report["groups"]
        if not g["pool_records"] or (g["traffic_share"] >= _LEAST and g["share_after"] < _THIN * g["traffic_share"])
    ]
    if not thin:
        return []
    thin.sort(key=lambda g: (-g["traffic_share"] + g["share_after"], g["number"]))
    return [
        "## Traffic that the weighted pool does not fill",
        "",
        "Groups that have less than half of their share of the traffic. Add such records to the pool.",
        "",
        *_table(thin[: 2 * _SHOWN]),
        "",
    ]


def _table(groups: Sequence[Document]) -> list[str]:
    rows = [
        [
            escaped(g["name"]),
            _percent(g["traffic_share"]),
            _percent(g["share_before"]),
            _percent(g["share_after"]),
            f"{g['weight']:.2f}" if g["pool_records"] else "–",
            f"{g['pool_records']:,}",
            " · ".join(escaped(shortened(p, _CELL)) for p in g["prompts"]),
        ]
        for g in groups
    ]
    return aligned(["group", "traffic", "pool before", "pool after", "weight", "pool records", "prompts"], rows)


def _left_out(report: Document) -> list[str]:
    dropped, answers = report["dropped"], report["answers"]
    lines = [
        f"- {dropped['count']:,} pool records hold a prompt of the traffic's test split, or nearly: their weight is 0."
    ]
    lines += [
        f"  - {escaped(e['place'])}: {escaped(shortened(e['prompt'], _CELL))} ({escaped(e['test_place'])}: "
        f"{escaped(shortened(e['test_prompt'], _CELL))})"
        for e in dropped["examples"][:3]
    ]
    for side, skipped in (("pool", report["skipped"]["pool"]), ("traffic", report["skipped"]["traffic"])):
        if skipped["count"]:
            lines.append(
                f"- {skipped['count']:,} broken records of the {side}, the first: {escaped(skipped['first'])}."
            )
    if answers["read"]:
        lines.append(
            "- Answers were read"
            + (", and weights count answer tokens." if answers["weights_count_tokens"] else
               ", but lengths were not compared: some are counted in token ids and some estimated from characters.")
        )  # fmt: skip
    else:
        bare = f"{answers['pool_unanswered']:,} pool records and {answers['traffic_unanswered']:,} of traffic have none"
        lines.append(f"- Answers were not read ({bare}): weights compare prompts, and count records, not tokens.")
    for kind, what in (("empty", "Empty answers"), ("cut", "Answers cut by a length limit")):
        pool, traffic = answers[f"pool_{kind}"], answers[f"traffic_{kind}"]
        if pool or traffic:
            lines.append(f"- {what}: {pool:,} in the pool, {traffic:,} in the traffic.")
    return lines


def _settings(report: Document) -> list[str]:
    return [
        f"{report['clusters']} groups, power of the density ratio β = {report['beta']:g}, temper τ = "
        f"{report['temper']:.3f}, {report['uniform']:.0%} uniform, {report['clipped']:,} weights clipped at "
        f"{report['clip']:.1f}, largest weight {report['weight_largest']:.1f}, seed {report['seed']}. The traffic has "
        f"{report['traffic_groups_of_near_duplicates']:,} groups of near-duplicates, the largest of "
        f"{report['traffic_largest_group_of_near_duplicates']:,} records. Hidden states: {report['hidden_states']}.",
        "",
        f"`{report['command']}`, {report['date']}, {report['seconds']:.0f} s, {report['records_per_second']:,.0f} pool "
        "records per second.",
    ]


def _percent(share: float) -> str:
    return f"{share:.1%}" if share == 0 or share >= 0.001 else "< 0.1%"


def escaped(text: str) -> str:
    """What Markdown would take as its own, marked as text."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$&!])", r"\\\1", text)


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table that reads in a terminal too."""
    widths = [max(_columns(row[i]) for row in (header, *rows)) for i in range(len(header) - 1)] + [len(header[-1])]
    head, *body = (
        "| " + " | ".join(cell + " " * (w - _columns(cell)) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in (header, *rows)
    )
    return [head, "|" + "|".join("-" * (w + 2) for w in widths) + "|", *body]


def _columns(text: str) -> int:
    """How wide a terminal shows it: Chinese characters are two columns."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
