"""Log-probabilities that vLLM gives to texts; ``engine_agreement.py`` runs this in the environment that holds vLLM.

    python scripts/bench/engine_logprobs.py MODEL TEXTS.json OUT.json

TEXTS.json is a list of lists of token ids; OUT.json gets the log-probability of every token but the first.
"""

import json
import sys
from pathlib import Path


def main(model: str, texts: str, out: str) -> None:
    from vllm import LLM, SamplingParams, TokensPrompt  # type: ignore[import-not-found]

    rows = json.loads(Path(texts).read_text(encoding="utf-8"))
    engine = LLM(model, dtype="float32", enforce_eager=True, max_model_len=max(map(len, rows)) + 1, max_num_seqs=8)
    scored = engine.generate(
        [TokensPrompt(prompt_token_ids=row) for row in rows],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
    )
    found = [
        [seen[token].logprob for token, seen in zip(r[1:], s.prompt_logprobs[1:], strict=True)]
        for r, s in zip(rows, scored, strict=True)
    ]
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":  # vLLM starts its workers from this file
    main(*sys.argv[1:])
