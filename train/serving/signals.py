"""Signals that end the script, turned into ``KeyboardInterrupt`` where that loses nothing.

Python may raise between any two lines of the main thread: also between the start of a process and the ``try`` that
ends it, or within the ``finally`` that does. There signals are held back until it is safe.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
"""A closed terminal or dropped connection, Ctrl-C, Ctrl-backslash, ``kill``."""


@dataclass
class Ending:
    """What to do with a signal that ends the script."""

    held: bool = True
    caught: int | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler: raises unless held. Who is told to end twice, as by a terminal and its shell, ends once."""
        self.caught = number
        if not self.held:
            self.release()

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        """Raise ``KeyboardInterrupt`` for a signal that came while it was held; from now on at once."""
        number, self.caught = self.caught, None
        self.held = number is not None
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number is not None:
            raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")


@contextmanager
def ended_like_ctrl_c() -> Iterator[Ending]:
    """Catch all of ``ENDING`` that are not ignored (as by ``nohup``), held at first. Call it in the main thread."""
    ending = Ending()
    heeded = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ending.note) for number in heeded}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        ending.release()
