"""The control thread's work: post messages, quiesce on a notice, show that the process is alive and where main is."""

import logging
import sys
import threading
import time
from typing import TYPE_CHECKING

from instep.agent.records import Header
from instep.board import Board, deliver
from instep.messages import Interrupt, Message

if TYPE_CHECKING:
    from instep.lifecycle import Lifecycle
    from instep.torch.gate import Gate
    from instep.torch.unwind import Unwinder

log = logging.getLogger(__name__)
_OWN_FAILURES = 0.03
"""Seconds for gloo to fail its own operations after its sockets were shut, before its lost ones are failed for it."""
_FIRST, _LONGEST = 0.005, 0.1


class Control:
    """Receives for one process. ``watch`` gives it what it needs to quiesce; until then notices are only posted."""

    def __init__(self, board: Board, header: Header) -> None:
        self._board, self._header = board, header
        self._main = threading.main_thread().ident
        self._beats = 0
        self._watched: tuple[Lifecycle, Unwinder, Gate] | None = None
        self._closed = False

    def watch(self, lifecycle: "Lifecycle", unwinder: "Unwinder", gate: "Gate") -> None:
        """From now on a notice interrupts main."""
        self._watched = (lifecycle, unwinder, gate)

    def close(self) -> None:
        """Main is leaving; nothing may be interrupted any more."""
        self._closed = True

    def on_message(self, message: Message) -> None:
        """Post one message; a fault starts to quiesce at once."""
        if not isinstance(message, Interrupt):
            deliver(self._board, message)
        elif self._board.interrupt(message.incarnation, message.fault) and self._watched is not None and not self._watched[2].loopback:
            threading.Thread(target=self._quiesce, args=(message,), name="instep-quiesce", daemon=True).start()

    def on_beat(self) -> None:
        """Show life, and a fingerprint of main's present instruction."""
        self._beats += 1
        self._header.put("beat", self._beats)
        if self._watched is not None:
            self._watched[2].show_waiting()
        frame = sys._current_frames().get(self._main or 0)
        if frame is not None:
            self._header.put("frame", hash((id(frame.f_code), frame.f_lasti)) & 0x7FFFFFFFFFFFFFFF)

    def _quiesce(self, message: Interrupt) -> None:
        if self._watched is None:
            return
        lifecycle, unwinder, gate = self._watched
        pause = _FIRST
        while not self._closed:
            try:
                if not lifecycle.quiesce(message.incarnation, message.fault):
                    return
            except Exception:  # as a plugin may raise anything; main still has to be told
                log.exception("quiesce failed in incarnation %d; it is tried again", message.incarnation)
            self._fail_lost(gate, message.incarnation)
            if self._board.acknowledged >= message.incarnation:
                return
            unwinder.insist()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _fail_lost(self, gate: "Gate", incarnation: int) -> None:
        until = time.monotonic() + _OWN_FAILURES
        while gate.stale(incarnation) and time.monotonic() < until:
            time.sleep(0.001)
        gate.fail_proxies(incarnation)
