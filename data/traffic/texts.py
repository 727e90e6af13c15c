"""What a record says, in which language, and how long it is: the facts from which features are made.

A record falls into what is asked (system, user and tool messages) and what the assistant answered. Tokens are ids where
the record holds the target's answers, and else an estimate from its characters: four to a token, 1.5 in scripts without
spaces and in Hangul. Compare records that are counted in one way.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bitdraft.data.conversation import Conversation

# n record.

DENSE = (
    "\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Characters of scripts that put no spaces between words, for a regular expression: Thai to Myanmar, Khmer, kana, Han
with its extensions."""
_PIECE = re.compile(f"[{DENSE}]|[^\\W{DENSE}]+|[^\\w\\s]")
_SCRIPTS = (  # in this order: Japanese is written with Han characters too
    ("ja", re.compile("[\u3040-\u30ff]")),
    ("ko", re.compile("[\uac00-\ud7af\u1100-\u11ff]")),
    ("zh", re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f]")),
    ("ru", re.compile("[\u0400-\u04ff]")),
    ("ar", re.compile("[\u0600-\u06ff]")),
    ("hi", re.compile("[\u0900-\u097f]")),
    ("he", re.compile("[\u0590-\u05ff]")),
    ("el", re.compile("[\u0370-\u03ff]")),
    ("th", re.compile("[\u0e00-\u0e7f]")),
)
_STOP_WORDS = {
    "en": "the and of to is that for with you what how are it this was from be have can which who",
    "es": "el los las que una por con para del se es como más está qué cómo pero son hay lo",
    "fr": "le les des est une que pour dans qui sur pas avec vous ce du au comment je sont et",
    "de": "der die das und ist ein eine nicht mit zu den von wie auf für ich sie es wird auch",
    "pt": "o os que uma para com não por mais como dos das em é você qual são um na no",
    "it": "il che di una per non con come sono della gli più è un del nel si la cosa questo",
}
_WORDS = {name: frozenset(words.split()) for name, words in _STOP_WORDS.items()}
LANGUAGES = ("none", *_WORDS, *(name for name, _ in _SCRIPTS))
"""``none``: too few words of any. Cyrillic counts as ``ru``, Arabic script as ``ar``, Devanagari as ``hi``, Han without
kana as ``zh``; of the languages in Latin script those with a list of stop words are told apart."""
_READ = 2000  # characters of a text from which its language is judged
_SCRIPT_SHARE = 0.2  # of the letters: below it, names and terms in a text of another language
_LANGUAGE_OF_LATIN = tuple(_WORDS)


def pieces(text: str) -> list[str]:
    """Words in lower case; characters of scripts without spaces and punctuation marks one by one."""
    return _PIECE.findall(text.lower())


def language_of(text: str) -> str:
    """One of ``LANGUAGES``, by script, then by stop words; the first of equals."""
    text = text[:_READ].lower()
    letters = sum(c.isalpha() for c in text)
    for name, script in _SCRIPTS:
        if letters and len(script.findall(text)) >= _SCRIPT_SHARE * letters:
            return name
    words = re.findall(r"[^\W\d_]+", text)
    found = {name: sum(w in stops for w in words) for name, stops in _WORDS.items()}
    best = max(_LANGUAGE_OF_LATIN, key=lambda name: found[name])
    return best if found[best] else "none"


def estimated_tokens(text: str) -> int:
    """Four characters to a token, 1.5 in scripts without spaces and in Hangul."""
    dense = 0 if text.isascii() else len(_DENSE_CHARACTER.findall(text))
    return round(dense / 1.5 + (len(text) - dense) / 4)


_DENSE_CHARACTER = re.compile(f"[{DENSE}\uac00-\ud7af]")


def asked_text(record: Conversation) -> str:
    """All that the assistant did not write."""
    return "\n".join(m.content for m in record.messages if m.role != "assistant")


def answer_text(record: Conversation) -> str:
    """All that the assistant wrote, thinking included."""
    return "\n".join(t for m in record.messages if m.role == "assistant" for t in (m.thinking, m.content) if t)


def is_answered(record: Conversation) -> bool:
    """Whether the record holds an answer to read: an assistant's message that is not empty."""
    return any(m.role == "assistant" and (m.content or m.thinking) for m in record.messages)


STYLES = 5


def style_of(text: str) -> tuple[float, ...]:
    """How it is written, which words in lower case do not tell: square roots of the shares of capitals, digits, marks
    and line breaks among the characters, and whether it begins with a capital."""
    if not text:
        return (0.0,) * STYLES
    kinds = (_CAPITAL, _DIGIT, _MARK, _BREAK)
    return (*((len(kind.findall(text)) / len(text)) ** 0.5 for kind in kinds), float(text[0].isupper()))


_CAPITAL, _DIGIT, _MARK, _BREAK = (re.compile(kind) for kind in ("[A-Z]", "[0-9]", r"[^\w\s]", "\n"))


@dataclass(frozen=True)
class Facts:
    """Of ``n`` records. The prompt's tokens are always estimated."""

    language: np.ndarray  # [n] int8, index into LANGUAGES
    turns: np.ndarray  # [n] int32, messages of the user
    thinking: np.ndarray  # [n] bool, some answer shows its thinking
    prompt_tokens: np.ndarray  # [n] float32
    answer_tokens: np.ndarray  # [n] float32, 0 without answers
    counted: np.ndarray  # [n] bool: the answer's tokens are the target's ids, not an estimate
    style: np.ndarray  # [n, 2 * STYLES] float32, of the prompt and of the answer, see style_of

    @classmethod
    def of(cls, records: Sequence[Conversation], asked: Sequence[str], answers: Sequence[str]) -> "Facts":
        """``asked`` and ``answers``: the texts of the records, empty answers where they shall not count."""
        used = [bool(r.answers) and bool(a) for r, a in zip(records, answers, strict=True)]
        tokens = [
            sum(map(len, r.answers)) if counted else estimated_tokens(a)
            for r, a, counted in zip(records, answers, used, strict=True)
        ]
        thinking = [bool(a) and any(m.thinking for m in r.messages) for r, a in zip(records, answers, strict=True)]
        return cls(
            np.array([LANGUAGES.index(language_of(text)) for text in asked], np.int8),
            np.array([sum(m.role == "user" for m in r.messages) for r in records], np.int32),
            np.array(thinking, bool),
            np.array([estimated_tokens(text) for text in asked], np.float32),
            np.array(tokens, np.float32),
            np.array(used, bool),
            np.array([style_of(a) + style_of(b) for a, b in zip(asked, answers, strict=True)], np.float32),
        )
