"""Signals are caught for a while, and what was before them comes back."""

from __future__ import annotations

import os
import signal
import threading

from tpucare.service.signals import handle_signals


def test_a_signal_calls_its_handler_and_what_was_before_comes_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    heard: list[int] = []
    with handle_signals({signal.SIGUSR1: heard.append}) as could:
        assert could
        os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_what_was_to_be_ignored_stays_so_where_that_is_asked_for() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with handle_signals({signal.SIGUSR1: heard.append}, keep_ignored=True):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == []
        with handle_signals({signal.SIGUSR1: heard.append}):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_off_the_main_thread_nothing_is_caught() -> None:
    told: list[bool] = []

    def work() -> None:
        with handle_signals({signal.SIGUSR1: lambda number: None}) as could:
            told.append(could)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert told == [False]
