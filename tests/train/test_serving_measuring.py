"""The engine with the head and without, here a script that counts drafts as vLLM does: with a head only."""

import os
import sys
from pathlib import Path

import pytest

from bitdraft.speculators.metrics import Acceptance
from bitdraft.train.serving.check import How, Ours, measure_engine
from bitdraft.train.serving.engine import EngineSpec

# Continues a prompt by its last token plus one. Writes down its arguments, one file a start.
STAND_IN = """\
import http.server, json, pathlib, sys
here = pathlib.Path(__file__).parent
argv = sys.argv[1:]
drafts = "--speculative-config" in argv or (here / "always").exists()
(here / f"start-{len(list(here.glob('start-*')))}").write_text(json.dumps(argv))
METRICS = '''
vllm:spec_decode_num_drafts_total 10.0
vllm:spec_decode_num_draft_tokens_total 20.0
vllm:spec_decode_num_accepted_tokens_total 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2.0
'''
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(METRICS if drafts else "vllm:other 1.0")
    def do_POST(self):
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        self.answer(json.dumps({"choices": [{"prompt_token_ids": prompt, "token_ids": [prompt[-1] + 1]}]}))
    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *a):
        pass
port = int(argv[argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
HOW = How(draft_length=2, max_new_tokens=4, dtype="float32", batch=2)
OURS = Ours(
    kind="medusa",
    head_fingerprint="",
    target_fingerprint="",
    prompts=[[1, 2], [3]],
    end_ids={9},
    answers=[[3], [4]],
    counts=Acceptance(2, 2, 10, 20, (5, 2), (10, 5)),
    served_on="none",
    computed_by="",
    exact_texts=True,
    exact_counts=True,
    trained={},
)


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    (tmp_path / "engine.py").write_text(STAND_IN, encoding="utf-8")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/engine.py" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return EngineSpec(
        python=python,
        target="TARGET",
        dtype="float32",
        context=64,
        sequences=2,
        head=tmp_path / "head",
        method="medusa",
        draft_length=2,
    )


def test_the_engine_is_asked_with_the_head_and_then_without(tmp_path: Path, spec: EngineSpec) -> None:
    served = measure_engine(spec, OURS, HOW, tmp_path / "logs", 30)
    assert served.with_head == served.alone == [[3], [4]]
    assert served.counts == OURS.counts
    first, second = ((tmp_path / f"start-{i}").read_text(encoding="utf-8") for i in range(2))
    assert "--speculative-config" in first and str(spec.head) in first
    assert "--speculative-config" not in second and str(spec.head) not in second
    logs = {log.name for log in (tmp_path / "logs").iterdir()}
    assert logs == {f"{os.getpid()}-with-head.log", f"{os.getpid()}-alone.log"}, "two runs would share a log"


def test_an_engine_alone_that_drafts_is_no_comparison(tmp_path: Path, spec: EngineSpec) -> None:
    (tmp_path / "always").touch()
    with pytest.raises(ValueError, match=r"drafts without a head.*: vllm:spec_decode_num_drafts_total 10\.0"):
        measure_engine(spec, OURS, HOW, tmp_path / "logs", 30)
