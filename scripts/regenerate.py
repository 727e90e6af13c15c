"""Answers to prompts, written by the low-bit target itself or by a server that serves it.

    python scripts/regenerate.py prompts.jsonl --out answers.jsonl --target-quant mxfp4
    python scripts/regenerate.py prompts.jsonl --out answers.jsonl --temperature 0.7 --top-p 0.95 --seed 1
    python scripts/regenerate.py prompts.jsonl --out answers.jsonl --server http://localhost:8000 --model target

What assistants said in the prompts is dropped; every user turn is answered, one after the other. A killed run goes on
where it was when the same command is given again. Train on the result with `--answers.source file` (docs/answers.md).
"""

import hashlib
import shlex
import sys
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bitdraft.data.answer_files import AnswerFile, answered_record
from bitdraft.data.calibration import CalibrationConfig
from bitdraft.data.chat import end_of_turn_ids, thinking_mode
from bitdraft.data.conversation import Conversation
from bitdraft.data.dialogs import AnswerSettings, Dialog, answer_dialogs
from bitdraft.data.server_answers import Asking, ServedDialog, Server, ServerConfig, serve_dialogs
from bitdraft.data.sources import read_conversations
from bitdraft.quant.target import CompileChoice, LowBitTarget
from bitdraft.speculators.sampling import Sampling
from bitdraft.train.environment import RunFailed, machine_facts, read_environment, stop_cleanly
from bitdraft.train.opening import open_target


@dataclass(frozen=True, kw_only=True)
class Options:
    """Let the low-bit target, or a server, answer prompts."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PROMPTS")]
    """Files of conversations, as for training (docs/data.md)."""
    out: Path
    """JSONL file for the answered conversations."""
    target: str = "demo"
    """Model folder or hub id; `demo` is the embedded SmolLM2-135M-Instruct."""
    target_quant: str = "mxfp4"
    """Preset or YAML recipe that the target answers with, or `auto` for a checkpoint that is already quantized."""
    target_profile: str = "plain"
    """Who computes: `plain`, or an engine on a chip, as in vllm-sm90 (docs/numerics.md)."""
    prompts: int | None = None
    """How many of the conversations, in order."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    batch_size: int = 32
    """Sequences decoded at once."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that hold this share of the probability; 1 draws from all."""
    seed: int = 0
    """Of the draws. Each turn of each conversation has random numbers of its own, whatever the batch and the order."""
    thinking: Literal["on", "off"] | None = None
    """Switch the chat template's thinking mode; by default the template decides."""
    skip_long: bool = False
    """Leave unanswered what has no room in the target's context, and count it; by default the run ends there."""
    skip_bad: bool = False
    """Leave out records that cannot be read, and count them."""
    server: str | None = None
    """Address of an OpenAI-compatible server that answers in place of the target, as in http://localhost:8000."""
    model: str | None = None
    """The name under which the server serves its model."""
    answered_by: str | None = None
    """What the server serves, as TARGET/RECIPE fingerprints, for the records; `target` takes them from `--target` and
    `--target-quant`, which are read for it."""
    dialect: Literal["engine", "openai"] = "engine"
    """`engine` is what vLLM and SGLang understand, token ids included; `openai` sends OpenAI's own fields alone."""
    concurrency: int = 16
    """Conversations that the server is asked at a time."""
    retries: int = 6
    """How often a request that failed is sent again, after longer and longer waits."""
    timeout: float = 600.0
    """Seconds that one answer of the server may take."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """`auto` is bfloat16 where the hardware multiplies it."""
    device: str = "cpu"
    compile_quantizer: CompileChoice = "auto"
    """Compile the activation quantizer (same bits, faster)."""
    trust_remote_code: bool = False
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    def __post_init__(self) -> None:
        for name in ("prompts", "max_new_tokens", "batch_size"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {given}")
        if (self.server is None) != (self.model is None):
            raise ValueError("--server and --model belong together: give both or neither")
        if self.answered_by is not None and self.server is None:
            raise ValueError("--answered-by is for --server: the target's own answers carry its fingerprints")

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p)

    @property
    def drawn(self) -> dict[str, Any]:
        """What decides the answers besides the one who answers, for the file."""
        drawn = {} if self.sampling.is_greedy else {"top_p": self.top_p, "seed": self.seed}
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            **drawn,
            "thinking": self.thinking,
        }


def main(options: Options) -> None:
    _ = options.sampling  # refuses what is no temperature before anything is read
    conversations = read_conversations(options.sources, skip_bad=options.skip_bad)[: options.prompts]
    if options.server is None:
        _by_target(options, conversations)
    else:
        _by_server(options, conversations)


def _by_target(options: Options, conversations: list[Conversation]) -> None:
    target, tokenizer = _load(options)
    end_ids = end_of_turn_ids(target.model, tokenizer)
    settings = {
        "target": target.fingerprint,
        "recipe": target.recipe.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16],
        "end_ids": sorted(end_ids),
        **options.drawn,
    }
    how = AnswerSettings(
        options.max_new_tokens, options.batch_size, options.sampling, options.seed, thinking_mode(options.thinking)
    )
    with AnswerFile(options.out, settings) as file:

        def keep(dialog: Dialog) -> None:
            if dialog.examples:
                record = answered_record(
                    dialog.conversation,
                    [*dialog.history, *dialog.unasked()],
                    answered_by=f"{target.fingerprint}/{target.recipe.fingerprint}",
                    finished=dialog.ended_by_itself,
                    answers=[e.answer for e in dialog.examples],
                )
                file.append(record)

        answer_dialogs(
            target,
            tokenizer,
            file.waiting(conversations),
            how,
            end_ids=end_ids,
            label=f"answers by the {target.recipe.name} target",
            finished=keep,
            skip_long=options.skip_long,
        )
        _finish(options, file, conversations, [])


def _by_server(options: Options, conversations: list[Conversation]) -> None:
    assert options.server is not None and options.model is not None
    config = ServerConfig(
        url=options.server,
        model=options.model,
        dialect=options.dialect,
        concurrency=options.concurrency,
        retries=options.retries,
        timeout=options.timeout,
    )
    asking = Asking(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        thinking=thinking_mode(options.thinking),
    )
    answered_by = options.answered_by or ""
    if answered_by == "target":
        target, _ = _load(options)
        answered_by = f"{target.fingerprint}/{target.recipe.fingerprint}"
        del target
    elif not answered_by:
        print("the answers will not say whose they are, and training will warn: give --answered-by")
    settings = {"model": options.model, "answered_by": answered_by, "dialect": options.dialect, **options.drawn}
    with AnswerFile(options.out, settings) as file:

        def keep(served: ServedDialog) -> None:
            tokens = [a.tokens for a in served.answers]
            record = answered_record(
                served.dialog.conversation,
                [*served.dialog.history, *served.dialog.unasked()],
                answered_by=answered_by,
                finished=[a.finished for a in served.answers],
                answers=tokens if all(tokens) else (),
            )
            file.append(record)

        server = Server(config, asking, read_environment().api_key)
        waiting = file.waiting(conversations)
        failed = serve_dialogs(server, waiting, label=f"answers by {options.model}", finished=keep)
        _finish(options, file, conversations, failed)


def _finish(options: Options, file: AnswerFile, conversations: list[Conversation], failed: list[str]) -> None:
    facts = {
        "failed": failed,
        "command": shlex.join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "machine": machine_facts(),
    }
    counts = file.finish(conversations, facts)
    print(
        f"{options.out}: {counts.records} records, {counts.answers} answers, {counts.tokens:,} tokens; "
        f"{counts.cut} cut by the limit, {counts.empty} empty, {counts.unanswered} turns without room, "
        f"{len(conversations) - counts.records} records without an answer"
    )
    if failed:
        raise RunFailed(f"{len(failed)} records have no answer ({failed[0]}): run the same command again for these")


def _load(options: Options) -> tuple[LowBitTarget, Any]:
    target, tokenizer = open_target(options, options.target, options.target_quant)
    print(f"target {options.target} ({target.fingerprint}), recipe {target.recipe.name}, {target.recipe.computed_by}")
    return target, tokenizer


if __name__ == "__main__":
    stop_cleanly(lambda: main(tyro.cli(Options, description=__doc__)))
