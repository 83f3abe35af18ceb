"""Signals: the first asks, the second ends."""

import os
import signal
import subprocess
import sys
import time

from sweeps.stopping import Stop, on_signals

PROGRAM = """
import sys, time
from sweeps.stopping import Stop, on_signals
stop = Stop()
with on_signals(stop, lambda: print("ending", flush=True)):
    print("ready", flush=True)
    stop.wait(60)
    print("asked", stop.signum, flush=True)
    time.sleep(60)
"""


def start(program: str = PROGRAM, *, ignore: tuple[signal.Signals, ...] = ()) -> subprocess.Popen:
    first = "".join(f"import signal; signal.signal({int(signum)}, signal.SIG_IGN)\n" for signum in ignore)
    process = subprocess.Popen([sys.executable, "-c", first + program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_second_signal_ends_the_process():
    with start() as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == f"asked {int(signal.SIGTERM)}\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "ending\n"
        assert process.wait(10) == 128 + signal.SIGINT


def test_an_ignored_signal_stays_ignored():
    """As under nohup."""
    with start(ignore=(signal.SIGHUP,)) as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == f"asked {int(signal.SIGINT)}\n"
        process.kill()


def test_signals_count_while_the_main_thread_is_inside_a_library():
    """As in a connection that does not come about: there, no Python handler runs."""
    # A computation in C that gives the interpreter's lock back and never looks for signals.
    busy = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
    program = PROGRAM.replace("stop.wait(60)", busy)
    with start(program) as process:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "ending\n"
        assert process.wait(10) == 128 + signal.SIGTERM


def test_handlers_are_put_back_and_can_be_taken_back_in_between():
    before = signal.getsignal(signal.SIGTERM)
    stop = Stop(grace_s=0.0)
    with on_signals(stop, lambda: None):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as a library does
        stop.rearm()
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(1)
        assert stop.signum == signal.SIGTERM
        time.sleep(0.01)
        assert stop.overdue
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_broken_sweep_is_a_reason_too():
    stop = Stop(grace_s=60.0)
    assert not stop.overdue
    stop.as_broken("ValueError: no")
    assert stop.requested
    assert not stop.overdue
    assert (stop.broken, stop.signum) == ("ValueError: no", None)
