"""Records as vectors: hashed n-grams, facts and, where a target is at hand, its hidden states.

Words and pairs of words of what is asked and of what is answered are hashed into ``BUCKETS`` counts each. Weighted as
in tf-idf and scaled to one length each, they are projected onto ``components`` directions (truncated SVD of a sample).
Facts stand beside them: language, turns, thinking, length bins (log2). Hidden states are reduced by PCA.

A space either reads answers or only what is asked; pool and traffic must be seen alike, so where some record of either
has no answer (``texts.is_answered``), make the space with ``answers=False``. After ``fit`` nothing depends on other
records: ``rows`` takes a stream in chunks. The fit is the same for the same records in any order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer

from bitdraft.data.conversation import Conversation
from bitdraft.data.traffic.texts import LANGUAGES, STYLES, Facts, answer_text, asked_text, is_answered, pieces

# n record, F feature, H hidden size of the target.

BUCKETS = 2**14
"""Of the counts of prompts, and as many of answers."""
MOST_BIN = 14  # 16k tokens and more
_TOKENS = HashingVectorizer(
    n_features=BUCKETS,
    tokenizer=pieces,
    token_pattern=None,
    lowercase=False,
    ngram_range=(1, 2),
    alternate_sign=False,
    norm=None,
    dtype=np.float32,
)
FACTS_SHARE = 0.5  # variance of the facts, where that of the texts is 1: distances see both
STATES_SHARE = 1.0


@dataclass(frozen=True)
class Rows:
    """What is known of ``n`` records; ``counts`` is large: drop it where it is not needed."""

    vectors: np.ndarray  # [n, F] float32
    counts: sparse.csr_matrix  # [n, BUCKETS], or [n, 2 * BUCKETS] with the answers' counts behind
    facts: Facts

    @property
    def answer_tokens(self) -> np.ndarray:
        """``[n]`` float32, see ``Facts``."""
        return self.facts.answer_tokens


@dataclass(frozen=True, eq=False)
class FeatureSpace:
    """Made by ``fit``."""

    answers: bool
    """Whether answers are read: every record must have one then."""
    weighting: tuple[TfidfTransformer, ...]
    projection: TruncatedSVD
    fact_mean: np.ndarray  # [facts]
    fact_scale: np.ndarray  # [facts]
    state_projection: PCA | None
    text_mean: np.ndarray  # [components]
    scales: np.ndarray  # [3] factors of texts, facts and states

    @classmethod
    def fit(
        cls,
        sample: Sequence[Conversation],
        *,
        answers: bool,
        components: int = 128,
        states: np.ndarray | None = None,
        state_components: int = 32,
        seed: int = 0,
    ) -> "FeatureSpace":
        """A space in which ``sample``, records of pool and traffic together, spreads out.

        ``states``: ``[n, H]`` of the sample (``pooled_states.target_vectors``). Raises ``ValueError`` for an empty
        sample and, with ``answers``, for a record that has none.
        """
        if not sample:
            raise ValueError("no records to make features from: pool and traffic are empty")
        order = np.array(sorted(range(len(sample)), key=lambda i: (sample[i].key, answer_text(sample[i]))))
        sample = [sample[i] for i in order]
        asked, answered, facts = _read(sample, answers)
        counts = _counts(asked, answered if answers else None)
        weighting = tuple(TfidfTransformer(sublinear_tf=True).fit(part) for part in _parts(counts))
        weighted = _weighted(counts, weighting)
        # Shares of a variance that is 0 where all records are equal; they are not used.
        with np.errstate(invalid="ignore", divide="ignore"):
            projection = TruncatedSVD(components, random_state=seed).fit(weighted)
        text = projection.transform(weighted)
        table = _fact_table(facts)
        spread = np.where((deviation := table.std(0)) > 1e-6, deviation, 1.0)
        fact_scale = np.where(_IS_NUMBER, spread, 1.0)
        state_projection, state_variance = None, 0.0
        if states is not None:
            found = min(state_components, *states.shape)
            state_projection = PCA(found, random_state=seed).fit(_checked_states(states, len(sample))[order])
            state_variance = float(state_projection.explained_variance_.sum())
        variances = (float(text.var(0).sum()), float((table / fact_scale).var(0).sum()), state_variance)
        scales = [
            (share / variance) ** 0.5 if variance > 1e-12 else 1.0
            for share, variance in zip((1.0, FACTS_SHARE, STATES_SHARE), variances, strict=True)
        ]
        return cls(
            answers, weighting, projection, table.mean(0), fact_scale, state_projection, text.mean(0), np.array(scales)
        )

    def rows(self, records: Sequence[Conversation], states: np.ndarray | None = None) -> Rows:
        """What is known of these records, in their order; ``states`` where the space was made with them."""
        if (states is None) != (self.state_projection is None):
            raise ValueError("hidden states are needed either for all records, also those of the fit, or for none")
        asked, answered, facts = _read(records, self.answers)
        counts = _counts(asked, answered if self.answers else None)
        text = self.projection.transform(_weighted(counts, self.weighting)) - self.text_mean
        table = (_fact_table(facts) - self.fact_mean) / self.fact_scale
        blocks = [text * self.scales[0], table * self.scales[1]]
        if states is not None:
            assert self.state_projection is not None
            blocks.append(self.state_projection.transform(_checked_states(states, len(records))) * self.scales[2])
        vectors = np.concatenate(blocks, axis=1).astype(np.float32)
        assert np.isfinite(vectors).all()
        return Rows(vectors, counts, facts)


def _read(records: Sequence[Conversation], answers: bool) -> tuple[list[str], list[str], Facts]:
    """What is asked, what is answered (empty where answers are not read), and the facts."""
    if answers and (bare := next((r for r in records if not is_answered(r)), None)) is not None:
        raise ValueError(
            f"{bare.source}: record {bare.id!r} has no answer; let the target write answers (scripts/regenerate.py), "
            "leave the record out, or match on prompts alone"
        )
    asked = [asked_text(r) for r in records]
    answered = [answer_text(r) if answers else "" for r in records]
    return asked, answered, Facts.of(records, asked, answered)


def _counts(asked: Sequence[str], answered: Sequence[str] | None) -> sparse.csr_matrix:
    parts = [_TOKENS.transform(texts) for texts in (asked, answered) if texts is not None]
    return sparse.hstack(parts, format="csr") if len(parts) > 1 else parts[0]


def _parts(counts: sparse.csr_matrix) -> list[sparse.csr_matrix]:
    """Prompts' counts, and answers' where there are."""
    return [counts[:, i : i + BUCKETS] for i in range(0, counts.shape[1], BUCKETS)]


def _weighted(counts: sparse.csr_matrix, weighting: Sequence[TfidfTransformer]) -> sparse.csr_matrix:
    """Each part of length 1: long texts weigh no more than short ones."""
    return sparse.hstack([w.transform(p) for w, p in zip(weighting, _parts(counts), strict=True)], format="csr")


def length_bins(tokens: np.ndarray) -> np.ndarray:
    """``[n]`` int: 0 for no token, else 1 + floor(log2), at most ``MOST_BIN``."""
    return np.minimum(np.ceil(np.log2(np.maximum(tokens, 0).astype(np.float64) + 1)), MOST_BIN).astype(int)


_ONE_HOT = len(LANGUAGES) + 2 * (MOST_BIN + 1)
_IS_NUMBER = np.array([False] * _ONE_HOT + [True] * (4 + 2 * STYLES))


def _fact_table(facts: Facts) -> np.ndarray:
    """``[n, facts]`` float64: languages and length bins one-hot, then logarithms of lengths and turns, thinking,
    style."""
    hot = [
        np.eye(len(LANGUAGES))[facts.language],
        np.eye(MOST_BIN + 1)[length_bins(facts.prompt_tokens)],
        np.eye(MOST_BIN + 1)[length_bins(facts.answer_tokens)],
    ]
    numbers = [np.log2(1.0 + x) for x in (facts.prompt_tokens, facts.answer_tokens, facts.turns)]
    return np.concatenate([*hot, np.stack([*numbers, facts.thinking.astype(float)], axis=1), facts.style], axis=1)


def _checked_states(states: np.ndarray, records: int) -> np.ndarray:
    """``[n, H]`` float32, each of length 1: a few directions of large states would hide the others."""
    if states.ndim != 2 or len(states) != records:
        raise ValueError(f"hidden states of shape {states.shape} do not belong to {records} records")
    if not np.isfinite(states).all():
        raise ValueError(
            "the target's hidden states hold NaN or infinity: a damaged target, or a recipe it cannot bear"
        )
    norms = np.linalg.norm(states, axis=1, keepdims=True)
    return (states / np.maximum(norms, 1e-12)).astype(np.float32)
