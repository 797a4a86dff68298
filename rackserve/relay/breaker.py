"""When to leave a worker alone, and when to stop trying again. Times are seconds that never go back."""

from __future__ import annotations

from collections import deque


class Breaker:
    """A worker's circuit: `failures` within `window` seconds open it for `rest` seconds, then one request may try the worker;
    its success closes the circuit, its failure opens it again.
    """

    __slots__ = ("_failures", "_failures_allowed", "_opened", "_rest", "_trying", "_window")

    def __init__(self, failures: int, window: float, rest: float) -> None:
        self._failures_allowed = failures
        self._window = window
        self._rest = rest
        self._failures: deque[float] = deque(maxlen=failures)
        self._opened: float | None = None
        self._trying = False

    @property
    def state(self) -> str:
        """closed, open or half_open (one request is trying the worker)."""
        return "closed" if self._opened is None else "half_open" if self._trying else "open"

    def allows(self, now: float) -> bool:
        """Whether the worker may be chosen. What is then sent must be told by `sent`."""
        return self._opened is None or (not self._trying and now - self._opened >= self._rest)

    def sent(self) -> None:
        """A request went there."""
        self._trying = self._opened is not None

    def succeeded(self) -> None:
        """The worker answered."""
        if self._opened is not None and not self._trying:
            return  # sent before the circuit opened: says nothing of now
        self._opened, self._trying = None, False
        self._failures.clear()

    def failed(self, now: float) -> None:
        """The worker did not answer, or said that it cannot."""
        if self._trying:
            self._opened, self._trying = now, False
            return
        self._failures.append(now)
        if self._opened is None and len(self._failures) == self._failures_allowed and now - self._failures[0] <= self._window:
            self._opened = now

    def gave_up(self) -> None:
        """A request ended without a verdict, such as by its client hanging up: another may try."""
        self._trying = False


class RetryBudget:
    """Bounds tries again by a share of all requests, so that a failing fleet does not get more load; a few are free."""

    __slots__ = ("_most", "_share", "_tokens")

    START = 10.0

    def __init__(self, share: float) -> None:
        self._share = share
        self._most = max(self.START, 100 * share)
        self._tokens = self.START

    def earn(self) -> None:
        """A request came."""
        self._tokens = min(self._most, self._tokens + self._share)

    def spend(self) -> bool:
        """Take one try, if there is one left."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
