"""The published chat formats, as small templates (``data/templates``) and spelled out in Python, to compare."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bitdraft.data.conversation import Message

TEMPLATES = Path(__file__).parent / "data" / "templates"


@dataclass(frozen=True)
class Format:
    """``prompt(history)`` is what a server sends, ``answer(message)`` what the model writes, end included."""

    file: str
    bos: str
    eos: str
    other: tuple[str, ...]
    """Further tokens of the format."""
    ends: tuple[str, ...]
    prompt: Callable[[Sequence[Message]], str]
    answer: Callable[[Message], str]
    thinking: bool | None = None
    """What the template is told."""
    takes_system: bool = True
    alternates: bool = False

    def tokenizer(self) -> Any:
        """Byte-level, with the format's tokens and its template."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(list(dict.fromkeys([self.bos, self.eos, *self.ends, *self.other])))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token=self.bos, eos_token=self.eos, clean_up_tokenization_spaces=False
        )
        tokenizer.chat_template = (TEMPLATES / f"{self.file}.jinja").read_text(encoding="utf-8")
        return tokenizer

    def end_ids(self, tokenizer: Any) -> set[int]:
        return {tokenizer.convert_tokens_to_ids(token) for token in self.ends}


def inline(message: Message) -> str:
    """As models write that have no place of their own for thinking."""
    return (f"<think>\n{message.thinking}\n</think>\n\n" if message.thinking else "") + message.content


def split_system(history: Sequence[Message]) -> tuple[str | None, Sequence[Message]]:
    return (history[0].content, history[1:]) if history[0].role == "system" else (None, history)


SMOL = Message("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face")


def chatml(history: Sequence[Message]) -> str:
    turns = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in history)
    return f"{turns}<|im_start|>assistant\n"


def smollm2(history: Sequence[Message]) -> str:
    return chatml(history if history[0].role == "system" else [SMOL, *history])


def llama3(history: Sequence[Message]) -> str:
    system, rest = split_system(history)
    date = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    text = f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{date}{(system or '').strip()}<|eot_id|>"
    for m in rest:
        text += f"<|start_header_id|>{m.role}<|end_header_id|>\n\n{m.content.strip()}<|eot_id|>"
    return f"{text}<|start_header_id|>assistant<|end_header_id|>\n\n"


def qwen3(message: Message) -> str:
    thought = message.thinking.strip("\n")
    return f"<think>\n{thought}\n</think>\n\n{message.content.lstrip(chr(10))}<|im_end|>"


def gemma(history: Sequence[Message]) -> str:
    system, rest = split_system(history)
    text = "<bos>"
    for i, m in enumerate(rest):
        role = "model" if m.role == "assistant" else m.role
        head = f"{system}\n\n" if system is not None and i == 0 else ""
        text += f"<start_of_turn>{role}\n{head}{m.content.strip()}<end_of_turn>\n"
    return f"{text}<start_of_turn>model\n"


def mistral(history: Sequence[Message]) -> str:
    system, rest = split_system(history)
    text = "<s>"
    for m in rest[:-1]:
        text += f"[INST] {m.content}[/INST]" if m.role == "user" else f" {m.content.strip()}</s>"
    head = "" if system is None else f"{system}\n\n"
    return f"{text}[INST] {head}{rest[-1].content}[/INST]"


def gpt_oss(history: Sequence[Message]) -> str:
    system, rest = split_system(history)
    text = "<|start|>system<|message|>Knowledge cutoff: 2024-06\nCurrent date: 2025-08-05\n\nReasoning: medium\n\n"
    text += "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
    if system is not None:
        text += f"<|start|>developer<|message|># Instructions\n\n{system}\n\n<|end|>"
    for m in rest:
        channel = "assistant<|channel|>final" if m.role == "assistant" else "user"
        text += f"<|start|>{channel}<|message|>{m.content}<|end|>"
    return f"{text}<|start|>assistant"


def harmony(message: Message) -> str:
    analysis = f"<|channel|>analysis<|message|>{message.thinking}<|end|><|start|>assistant" if message.thinking else ""
    return f"{analysis}<|channel|>final<|message|>{message.content}<|return|>"


IM = ("<|im_start|>", "<|im_end|>", (), ("<|im_end|>",))
GEMMA = ("<bos>", "<eos>", ("<start_of_turn>",), ("<eos>", "<end_of_turn>"), gemma)
HEADER = ("<|start_header_id|>", "<|end_header_id|>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>")


def turn(end: str, *, trim: bool = False, before: str = "") -> Callable[[Message], str]:
    return lambda m: before + (inline(m).strip() if trim else inline(m)) + end


FORMATS = {
    "smollm2": Format("chatml", *IM, smollm2, turn("<|im_end|>")),
    "marked": Format("chatml_marked", *IM, chatml, turn("<|im_end|>")),
    "llama3": Format(
        "llama3",
        "<|begin_of_text|>",
        "<|eot_id|>",
        HEADER,
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        llama3,
        turn("<|eot_id|>", trim=True),
    ),
    "qwen3": Format("qwen3", *IM, chatml, qwen3),
    "qwen3-thinks": Format("qwen3", *IM, chatml, qwen3, thinking=True),
    "qwen3-does-not-think": Format(
        "qwen3",
        *IM,
        lambda history: f"{chatml(history)}<think>\n\n</think>\n\n",
        lambda m: f"{m.content.lstrip(chr(10))}<|im_end|>",
        thinking=False,
    ),
    "gemma2": Format("gemma2", *GEMMA, turn("<end_of_turn>", trim=True), takes_system=False, alternates=True),
    "gemma3": Format("gemma3", *GEMMA, turn("<end_of_turn>", trim=True), alternates=True),
    "mistral": Format(
        "mistral",
        "<s>",
        "</s>",
        ("[INST]", "[/INST]"),
        ("</s>",),
        mistral,
        turn("</s>", trim=True, before=" "),
        alternates=True,
    ),
    "gpt-oss": Format(
        "gpt_oss", "<|startoftext|>", "<|return|>", HARMONY, ("<|return|>", "<|call|>"), gpt_oss, harmony
    ),
}
