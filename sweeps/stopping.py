"""Ending a run early and in order: what asks for it, and how long the workers have."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

GRACE_S = 120.0
"""How long workers may take to write their checkpoints before they are ended."""

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stop:
    """Whether a run should end early, and why. Shared by the threads of the driver."""

    def __init__(self, grace_s: float = GRACE_S):
        self._grace_s = grace_s
        self._event = threading.Event()
        self._since = 0.0
        self.rearm: Callable[[], None] = lambda: None  # takes the signals back from a library that took them
        self.signum: int | None = None
        self.broken: str | None = None  # the error by which the sweep itself is broken

    @property
    def requested(self) -> bool:
        """No further pack should start; running ones should save and end."""
        return self._event.is_set()

    @property
    def overdue(self) -> bool:
        """The workers had their time."""
        return self.requested and time.monotonic() - self._since > self._grace_s

    def by_signal(self, signum: int) -> None:
        """A person, or whoever manages this process, wants it to end."""
        self.signum = signum
        self._request()

    def as_broken(self, error: str) -> None:
        """The sweep fails wherever it is tried."""
        self.broken = error
        self._request()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for a request; returns whether there is one."""
        return self._event.wait(timeout_s)

    def _request(self) -> None:
        if not self.requested:
            self._since = time.monotonic()
            self._event.set()


@contextmanager
def on_signals(stop: Stop, end_now: Callable[[], None]) -> Iterator[None]:
    """Within it, a first signal asks `stop`, and a second one ends this process at once.

    Signals are taken in by a thread, so that they count even while the main thread waits inside a library. A signal
    that was ignored, as under nohup, stays so.

    Args:
      stop: asked by the first signal.
      end_now: called by the second one, right before the process ends with 128 + the signal's number.
    """
    previous = {signum: signal.getsignal(signum) for signum in SIGNALS}
    handled = [signum for signum, handler in previous.items() if handler is not signal.SIG_IGN]
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def arm() -> None:
        # The interpreter writes the number of each signal that has a handler into the pipe, at once.
        for signum in handled:
            signal.signal(signum, _do_nothing)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def listen() -> None:
        while signum := os.read(read_end, 1)[0]:
            if signum not in handled:
                continue
            if stop.signum is None:
                stop.by_signal(signum)
                continue
            try:
                end_now()
            finally:
                os._exit(128 + signum)

    listener = threading.Thread(target=listen, name="signals", daemon=True)
    listener.start()
    previous_fd = signal.set_wakeup_fd(-1)
    arm()
    stop.rearm = arm
    try:
        yield
    finally:
        stop.rearm = lambda: None
        signal.set_wakeup_fd(previous_fd)
        for signum in handled:
            signal.signal(signum, previous[signum] or signal.SIG_DFL)
        os.write(write_end, bytes([_END]))
        listener.join()
        os.close(read_end)
        os.close(write_end)


_END = 0  # no signal has this number


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """A handler must exist for a signal to be noticed."""
