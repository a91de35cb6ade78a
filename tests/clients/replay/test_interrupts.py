"""Ctrl-C while a replay counts: noted once, and every handler is as it was afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from saltern.errors import UnavailableError
from saltern.replay.interrupts import Interrupt, held_interrupts, raise_end

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Handlers of the test's own, so that it sees whether they come back."""
    previous = [signal.signal(number, handled) for number in NUMBERS]
    yield
    for number, handler in zip(NUMBERS, previous, strict=True):
        signal.signal(number, handler)


def handled(number: int, _: object) -> None:
    raise AssertionError(f"signal {number} came through")


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_one_is_noted_and_a_second_one_would_end_the_process(number: signal.Signals) -> None:
    stopped = []
    with held_interrupts(lambda: stopped.append(True)) as interrupt:
        assert not interrupt.came
        signal.raise_signal(number)
        assert interrupt.came and stopped == [True]
        assert [signal.getsignal(each) for each in NUMBERS] == [signal.SIG_DFL] * 2
    assert [signal.getsignal(each) for each in NUMBERS] == [handled] * 2


def test_a_second_one_ends_the_process() -> None:
    code = """if True:
        import signal
        from saltern.replay.interrupts import held_interrupts
        with held_interrupts(lambda: None):
            signal.raise_signal(signal.SIGTERM)
            print("held", flush=True)
            signal.raise_signal(signal.SIGINT)
        print("not reached")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "held\n"), done.stderr


def test_what_was_ignored_stays_ignored_and_errors_put_everything_back() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(RuntimeError), held_interrupts(lambda: None) as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert not interrupt.came
        raise RuntimeError
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is handled


def test_outside_the_main_thread_nothing_changes() -> None:
    seen = []

    def hold() -> None:
        with held_interrupts(lambda: None):
            seen.extend(signal.getsignal(number) for number in NUMBERS)

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert seen == [handled] * 2


def test_what_is_raised_at_the_end() -> None:
    error = UnavailableError("node-0 has ended", reason="NODE_ENDED")
    raise_end(Interrupt(), None)
    with pytest.raises(UnavailableError):
        raise_end(Interrupt(), error)
    with pytest.raises(KeyboardInterrupt) as caught:
        raise_end(Interrupt(came=True), error)
    assert caught.value.__cause__ is error
