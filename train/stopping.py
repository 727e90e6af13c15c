"""Ctrl-C and SIGTERM end a run behind a whole step."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop; its checkpoint is written."""


class Stop:
    requested = False


@contextmanager
def stop_requests() -> Iterator[Stop]:
    """Ctrl-C or SIGTERM asks the loop to finish its step; a second one stops at once."""
    stop = Stop()

    def ask(number: int, _frame: object) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        print(f"\n{signal.Signals(number).name}: writing a checkpoint after this step", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
