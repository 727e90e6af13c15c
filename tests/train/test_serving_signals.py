"""Signals that end the script: all of them, once, and never where the engine would be lost."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bitdraft.train.serving import engine as module
from bitdraft.train.serving.engine import EngineSpec, running
from bitdraft.train.serving.signals import ENDING, ended_like_ctrl_c

SPEC = EngineSpec(python=Path(sys.executable), target="T", dtype="float32", context=8, sequences=1)
Started = list["subprocess.Popen[bytes]"]


@pytest.fixture(autouse=True)
def nothing_is_ignored() -> Iterator[None]:
    """Whatever the tests were started with."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Processes that were started in place of engines; each only waits."""
    processes: Started = []

    class Waiting(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **how: Any) -> None:
            super().__init__([sys.executable, "-c", "import time; time.sleep(600)"], **how)
            processes.append(self)

    monkeypatch.setattr(module.subprocess, "Popen", Waiting)
    monkeypatch.setattr(module, "is_healthy", lambda url: True)
    return processes


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_at_the_very_start_of_the_engine_does_not_orphan_it(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    start = subprocess.Popen

    def interrupted(*given: Any, **how: Any) -> "subprocess.Popen[bytes]":
        process = start(*given, **how)
        os.kill(os.getpid(), number)  # before anybody knows of the process
        return process

    monkeypatch.setattr(module.subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt), running(SPEC, tmp_path / "log", start_seconds=9):
        pytest.fail("the block must not be entered")
    assert [process.poll() for process in started] == [-signal.SIGTERM]


def test_a_signal_while_the_engine_is_stopped_waits_and_then_ends_the_script(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = module._stop

    def interrupted(process: "subprocess.Popen[bytes]") -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        stop(process)

    monkeypatch.setattr(module, "_stop", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGHUP"), running(SPEC, tmp_path / "log", start_seconds=9):
        pass
    assert [process.poll() for process in started] == [-signal.SIGTERM]


def test_a_second_signal_does_not_disturb_the_way_out() -> None:
    cleaned = False
    with pytest.raises(KeyboardInterrupt), ended_like_ctrl_c() as ending:
        ending.release()
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned = True
    assert cleaned


def test_what_is_ignored_stays_ignored_and_the_rest_is_as_before() -> None:
    """As under ``nohup``, which ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    others = [signal.getsignal(number) for number in ENDING]
    try:
        with ended_like_ctrl_c() as ending:
            ending.release()
            os.kill(os.getpid(), signal.SIGHUP)
        assert [signal.getsignal(number) for number in ENDING] == others
    except KeyboardInterrupt:
        pytest.fail("SIGHUP was heeded")
    finally:
        signal.signal(signal.SIGHUP, before)
