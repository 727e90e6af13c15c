"""The command that serves a head with its target, for each engine that reads the head's layout."""

import json
import shlex
from collections.abc import Sequence

_TENSORRT = """\
speculative_config:
  decoding_type: Eagle3
  max_draft_len: {length}
  speculative_model: {head}
  eagle3_layers_to_capture: [{layers}]"""


def vllm_speculation(head: str, kind: str, draft_length: int) -> list[str]:
    """vLLM's option that drafts with ``head``; it calls the kinds of heads as we do."""
    drafts = {"model": head, "method": kind, "num_speculative_tokens": draft_length}
    return ["--speculative-config", json.dumps(drafts)]


def vllm_command(target: str, head: str, kind: str, draft_length: int) -> list[str]:
    """``vllm serve`` with the head beside the target."""
    return ["vllm", "serve", target, *vllm_speculation(head, kind, draft_length)]


def sglang_command(target: str, head: str, draft_length: int) -> list[str]:
    """SGLang's server drafting chains: every step one token, verified with the newest one."""
    return [
        *["python", "-m", "sglang.launch_server", "--model-path", target],
        *["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", head],
        *["--speculative-num-steps", str(draft_length), "--speculative-eagle-topk", "1"],
        *["--speculative-num-draft-tokens", str(draft_length + 1)],
    ]


def serve_texts(
    engines: Sequence[str], target: str, head: str, kind: str, draft_length: int, captured: Sequence[int]
) -> dict[str, str]:
    """For every engine, in words that a person pastes: a shell command, or a file and a command.

    ``captured``: the head's layers, which TensorRT-LLM is told by their outputs.
    """
    layers = ", ".join(str(k - 1) for k in captured)
    texts = {
        "vLLM": shlex.join(vllm_command(target, head, kind, draft_length)),
        "SGLang": shlex.join(sglang_command(target, head, draft_length)),
        "TensorRT-LLM": "cat > speculation.yaml <<'END'\n"
        + _TENSORRT.format(length=draft_length, head=head, layers=layers)
        + "\nEND\n"
        + shlex.join(["trtllm-serve", target, "--extra_llm_api_options", "speculation.yaml"]),
        "text-generation-inference": "# the head's config.json names its target\n"
        + shlex.join(["text-generation-launcher", "--model-id", head]),
    }
    return {engine: texts[engine] for engine in engines}
