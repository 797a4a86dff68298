"""Stop strings in a stream: text that could still become one is held back."""

from __future__ import annotations


class _Matcher:
    """How much of one stop string the text now ends with (Knuth-Morris-Pratt)."""

    __slots__ = ("_fallback", "_stop", "length")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._fallback = [0] * len(stop)  # longest proper border of each prefix
        self.length = 0
        for place in range(1, len(stop)):
            self._fallback[place] = self._step(self._fallback[place - 1], stop[place])

    def _step(self, length: int, character: str) -> int:
        while length and self._stop[length] != character:
            length = self._fallback[length - 1]
        return length + 1 if self._stop[length] == character else 0

    def feed(self, character: str) -> bool:
        """Take one more character; True when the whole stop string has been seen."""
        self.length = self._step(self.length, character)
        return self.length == len(self._stop)


class StopFinder:
    """Cuts a text before the first place at which any stop string begins.

    That place does not depend on how the text is cut into pieces: when one stop string is complete but a longer one that
    began before it may still come true, the decision waits. `stopped` is final; afterwards nothing more comes out.
    """

    __slots__ = ("_found", "_held", "_matchers", "_read", "_start", "_stops", "stopped")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._found = ""  # the complete stop string that begins at `_start`
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""  # text not yet let go; it ends at character number `_read`
        self._read = 0
        self._start = -1  # where the earliest complete stop string begins, or -1
        self.stopped = False

    @property
    def wanted(self) -> bool:
        """There are stop strings to find."""
        return bool(self._matchers)

    @property
    def found(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._found if self.stopped else None

    def feed(self, text: str) -> str:
        """The text that may be shown now that `text` has arrived."""
        if not self._matchers:
            return text
        if self.stopped:
            return ""
        self._held += text
        first_held = self._read + len(text) - len(self._held)
        for character in text:
            self._advance(character)
            if self.stopped:
                break
        end = self._start if self.stopped else self._doubtful()
        shown = self._held[: end - first_held]
        self._held = self._held[end - first_held :]
        return shown

    def flush(self) -> str:
        """The end of the text: what was held back, up to a complete stop string if there is one."""
        if self.stopped:
            return ""
        self.stopped = self._start >= 0
        first_held = self._read - len(self._held)
        shown = self._held[: self._start - first_held] if self.stopped else self._held
        self._held = ""
        return shown

    def _advance(self, character: str) -> None:
        self._read += 1
        for stop, matcher in zip(self._stops, self._matchers, strict=True):
            if matcher.feed(character):
                start = self._read - matcher.length
                if self._start < 0 or start < self._start:
                    self._start, self._found = start, stop
                matcher.length = 0
        self.stopped = self._start >= 0 and self._doubtful() >= self._start

    def _doubtful(self) -> int:
        """Number of the first character that may belong to a stop string."""
        pending = min(self._read - matcher.length for matcher in self._matchers)
        return pending if self._start < 0 else min(pending, self._start)
