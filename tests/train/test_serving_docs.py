"""Every command of docs/serving.md is one that its engine's parser takes."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("BITDRAFT_ENGINE_PYTHON") or ROOT / ".venv-serve" / "bin" / "python")
TEXT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
PROGRAMS = {
    "vllm": ["vllm", "serve"],
    "sglang": ["python", "-m", "sglang.launch_server"],
    "trtllm": ["trtllm-serve"],
    "serve_check": ["python", "scripts/serve_check.py"],
}

# From the sources of TensorRT-LLM at 00209af1: tensorrt_llm/commands/serve.py, and Eagle3DecodingConfig with its bases
# in tensorrt_llm/llmapi/llm_args.py. It installs on machines with NVIDIA GPUs only.
TENSORRT_FLAGS = {"--extra_llm_api_options", "--config", "--tp_size", "--max_batch_size", "--host", "--port"}
TENSORRT_FIELDS = {
    "decoding_type",
    "max_draft_len",
    "speculative_model",
    "eagle3_layers_to_capture",
    "eagle3_one_model",
}

# One process for all commands of an engine: reads argument lists, prints the parsed values or the parser's complaint.
PARSE = """\
import contextlib, io, json, sys
{parser}
found = []
for argv in json.load(sys.stdin):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            values = vars(parser.parse_args(argv))
        found.append({{k: v for k, v in values.items() if isinstance(v, (str, int, float, dict, type(None)))}})
    except SystemExit:
        found.append(said.getvalue()[-300:])
print("\\n" + json.dumps([found, fields]))
"""
VLLM = """\
import dataclasses
from vllm.config import SpeculativeConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
fields = [f.name for f in dataclasses.fields(SpeculativeConfig)]"""
SGLANG = """\
import argparse
from sglang.srt.server_args import ServerArgs
parser, fields = argparse.ArgumentParser(), []
ServerArgs.add_cli_args(parser)"""


def commands(program: str) -> list[list[str]]:
    """The arguments behind ``program`` in every shell block of the page."""
    begins = PROGRAMS[program]
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if words[: len(begins)] == begins:
                found.append(words[len(begins) :])
    return found


def parsed(code: str, argvs: list[list[str]]) -> tuple[list[Any], list[str]]:
    """What the engine's parser makes of each list, and the names of its drafting fields; skips without an engine."""
    if not PYTHON.is_file():
        pytest.skip("no engine in .venv-serve: `make test-serve` installs one")
    done = subprocess.run(
        [str(PYTHON), "-c", PARSE.format(parser=code)],
        input=json.dumps(argvs),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if "No module named 'sglang'" in done.stderr:
        pytest.skip("no SGLang in .venv-serve: `make test-serve` installs its parser")
    assert done.returncode == 0, done.stderr[-2000:]
    found, fields = json.loads(done.stdout.splitlines()[-1])
    return found, fields


def test_the_page_shows_every_program() -> None:
    counts = {program: len(commands(program)) for program in PROGRAMS}
    assert counts == {"vllm": 4, "sglang": 2, "trtllm": 1, "serve_check": 2}


def test_vllm_takes_its_commands() -> None:
    argvs = commands("vllm")
    assert "--trust-remote-code" in TEXT
    found, fields = parsed(
        VLLM,
        [*argvs, ["TARGET", "--trust-remote-code"], ["TARGET", "--speculative-configuration-of-no-engine", "3"]],
    )
    assert isinstance(found.pop(), str), "a flag that does not exist must be refused"
    assert found.pop()["trust_remote_code"] is True
    for argv, values in zip(argvs, found, strict=True):
        assert isinstance(values, dict), values
        assert values["model_tag"] == argv[0]
        drafts = values["speculative_config"]
        assert drafts is None or set(drafts) <= set(fields)
    assert [v["speculative_config"] and v["speculative_config"]["method"] for v in found] == [
        "eagle3",
        "medusa",
        None,
        "eagle3",
    ]
    assert found[3]["kv_cache_dtype"] == "fp8"


def test_sglang_takes_its_commands() -> None:
    argvs = commands("sglang")
    found, _ = parsed(SGLANG, [*argvs, ["--model-path", "TARGET", "--speculative-steps-of-no-engine", "3"]])
    assert isinstance(found.pop(), str), "a flag that does not exist must be refused"
    for values in found:
        assert isinstance(values, dict), values
        assert (values["model_path"], values["speculative_draft_model_path"]) == ("TARGET", "HEAD")
        assert values["speculative_algorithm"] == "EAGLE3"
    chain = found[0]
    assert chain["speculative_eagle_topk"] == 1
    assert chain["speculative_num_draft_tokens"] == chain["speculative_num_steps"] + 1


def test_tensorrt_has_the_options_that_its_command_and_file_name() -> None:
    for argv in commands("trtllm"):
        assert {word for word in argv if word.startswith("-")} <= TENSORRT_FLAGS
    (block,) = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    settings = yaml.safe_load(block)
    assert set(settings) == {"speculative_config"}
    assert set(settings["speculative_config"]) <= TENSORRT_FIELDS
    assert "eagle3_layers_to_capture" in TEXT


def test_the_script_takes_its_commands(tmp_path: Path) -> None:
    """And shows the page's first command in its own docstring, up to the name of the file that is written."""
    path = ROOT / "scripts" / "serve_check.py"
    found = importlib.util.spec_from_file_location("serve_check", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["serve_check"] = module  # where dataclasses look for their module
    found.loader.exec_module(module)
    for argv in commands("serve_check"):
        options = tyro.cli(module.Options, args=argv)
        assert options.export.parts
    (shown,) = re.findall(r"^    python scripts/serve_check\.py (.+)$", module.__doc__ or "", re.MULTILINE)
    assert shlex.split(shown)[:-1] == commands("serve_check")[0][:-1]
    assert str(ROOT / "data" / "demo" / "heldout.jsonl") == str((ROOT / commands("serve_check")[0][5]).resolve())


def test_the_page_pins_what_the_makefile_pins() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    engine = re.search(r"^ENGINE := (.+)$", makefile, re.MULTILINE)
    assert engine is not None
    assert engine[1] in TEXT
    from bitdraft.train.serving.engine import ENGINE, HOW_TO_INSTALL

    assert ENGINE in engine[1].split()
    assert engine[1].split()[0] in HOW_TO_INSTALL
