"""Which prompts ask nearly the same.

Two records are near-duplicates if their users say the same, but for case, width, punctuation and spaces, or if they
share an opening message of at least eight words, or a run of 13 words (Brown et al. 2020, arXiv:2005.14165, appendix
C). Where a script puts no spaces between words, a character counts as a word in runs, which have 24 then, and as half a
word in openings. Only users' messages count: system prompts and tools are the same in many records.

The trap is a template: a run that stands in many different prompts ("Summarise the following article in …") makes no
duplicates of them, or all traffic of a product would be one. Such runs are left out.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from bitdraft.data.conversation import Conversation
from bitdraft.data.traffic.texts import DENSE

TEMPLATE = 10
"""A run in more different prompts than this is a template."""
_RUN = 13
_RUN_OFDENSE = 24  # about 14 Chinese words
_SHORTEST_OPENING = 8  # words; two characters are a word
_WORDS = re.compile(f"[{DENSE}]|[^\\W_{DENSE}]+")
_IS_CHARACTER = re.compile(f"[{DENSE}]")
# Polynomial hashes of runs, modulo 2^64; any odd number has an inverse there.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)


@dataclass(frozen=True)
class Prints:
    """What a record is recognised by. Codes hold within one process: Python salts the hashes of words."""

    whole: int
    """Code of all that the users say."""
    parts: np.ndarray  # [codes] uint64, each once: of messages and of runs of words


def words(text: str) -> list[str]:
    """Letters and digits in runs, characters of scripts without spaces one by one; the text itself if it has none."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return _WORDS.findall(plain.casefold()) or plain.split()


def normalised(conversation: Conversation) -> str:
    """All that the users say, but for case, punctuation and spaces."""
    return "\n".join(" ".join(words(m.content)) for m in conversation.messages if m.role == "user")


def prints(conversation: Conversation) -> Prints:
    said = [words(m.content) for m in conversation.messages if m.role == "user"]
    codes = [code for number, message in enumerate(said) for code in _parts(message, opens=number == 0)]
    parts = np.unique(np.concatenate(codes)) if codes else np.empty(0, np.uint64)
    return Prints(hash(tuple(map(tuple, said))), parts)


def _parts(message: Sequence[str], *, opens: bool) -> list[np.ndarray]:
    """Codes of the message's runs and, if it opens the conversation, of the message itself; each ``[n]`` uint64."""
    count = len(message)
    if count < _SHORTEST_OPENING:
        return []
    is_character = np.zeros(count, bool)
    if not all(map(str.isascii, message)):
        is_character = np.array([_IS_CHARACTER.match(word) is not None for word in message])
    codes = []
    if opens and count - is_character.sum() / 2 >= _SHORTEST_OPENING:
        codes.append(np.array([hash(tuple(message))], np.int64).view(np.uint64))
    if count < _RUN:
        return codes
    powers, inverses = _powers(count)
    hashes = np.fromiter(map(hash, message), np.int64, count).view(np.uint64)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes * powers)])

    def runs(length: int) -> np.ndarray:  # [count - length + 1], or none
        starts = max(count - length + 1, 0)
        return (sums[length:] - sums[:starts]) * inverses[:starts] if starts else np.empty(0, np.uint64)

    if not is_character.any():
        return [*codes, runs(_RUN)]
    # The first 13 words decide how long a run is, so that it is as long wherever it stands.
    seen = np.concatenate([np.zeros(1, int), np.cumsum(is_character)])
    dense = 2 * (seen[_RUN:] - seen[: count - _RUN + 1]) > _RUN
    long = runs(_RUN_OFDENSE)
    return [*codes, runs(_RUN)[~dense], long[dense[: len(long)]]]


def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """``_BASE`` and its inverse to the powers 0, 1, …, each ``[count]`` uint64."""
    global _TABLE
    if len(_TABLE[0]) < count:
        size = 2 * count
        factors = [np.full(size, factor, np.uint64) for factor in (_BASE, _INVERSE)]
        for row in factors:
            row[0] = 1
        _TABLE = (np.cumprod(factors[0]), np.cumprod(factors[1]))
    return _TABLE[0][:count], _TABLE[1][:count]


_TABLE = (np.ones(1, np.uint64), np.ones(1, np.uint64))


def near_duplicates(records: Sequence[Conversation]) -> np.ndarray:
    """``[n]`` the group of every record: records that are linked, directly or by others, have the same number."""
    seen = [prints(record) for record in records]
    _, version = np.unique(np.array([p.whole for p in seen], np.int64), return_inverse=True)
    first = np.unique(version, return_index=True)[1]  # one record of each wording
    codes = np.concatenate([np.empty(0, np.uint64), *(seen[i].parts for i in first)])
    owners = np.repeat(np.arange(len(first)), [len(seen[i].parts) for i in first])
    order = np.lexsort((owners, codes))
    codes, owners = codes[order], owners[order]
    _, place, count = np.unique(codes, return_inverse=True, return_counts=True)
    linked = count[place] <= TEMPLATE
    same = np.flatnonzero((codes[1:] == codes[:-1]) & linked[1:])
    links = coo_matrix((np.ones(len(same)), (owners[same], owners[same + 1])), shape=(len(first),) * 2)
    groups: np.ndarray = connected_components(links, directed=False)[1][version]
    return groups


def templates(records: Sequence[Conversation]) -> np.ndarray:
    """Codes of the parts that stand in more than ``TEMPLATE`` different prompts, ascending, ``[codes]`` uint64."""
    wordings = {p.whole: p.parts for p in map(prints, records)}
    codes, count = np.unique(np.concatenate([np.empty(0, np.uint64), *wordings.values()]), return_counts=True)
    return codes[count > TEMPLATE]


def digest(conversation: Conversation) -> str:
    """Of the normalised prompt: the same in every process."""
    return blake2b(normalised(conversation).encode(), digest_size=16).hexdigest()
