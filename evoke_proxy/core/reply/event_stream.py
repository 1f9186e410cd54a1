"""Splits event streams (Server-Sent Events) that arrive in chunks into lines and events."""

from __future__ import annotations

from typing import NamedTuple

DATA_FIELD = b"data:"


class Line(NamedTuple):
    """A line of a stream, or a part of a line that is too long to keep."""

    # The bytes with their line end; the last line of a stream may lack it.
    data: bytes
    # False for the parts of a line that is longer than the limit of its reader.
    is_whole: bool = True


class LineReader:
    """Splits bytes into lines that end with LF, CRLF or CR; keeps at most one line in memory.

    Joined, the data of all lines are the bytes that were fed. Of a line with more than `max_bytes`
    the parts are given as they arrive.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()
        self._is_too_long = False

    def feed(self, data: bytes) -> list[Line]:
        """The lines that end in these bytes.

        A CR at their end waits for the next byte, which may be its LF.
        """
        lines: list[Line] = []
        waits_for_lf = self._rest.endswith(b"\r")
        self._rest += data
        if waits_for_lf or b"\n" in data or b"\r" in data:
            pieces = bytes(self._rest).splitlines(keepends=True)
            self._rest.clear()
            if not pieces[-1].endswith(b"\n"):
                self._rest += pieces.pop()
            for piece in pieces:
                is_whole = not self._is_too_long and len(piece) <= self._max_bytes
                self._is_too_long = False
                lines.append(Line(piece, is_whole))
        if self._is_too_long or len(self._rest) > self._max_bytes:
            self._is_too_long = True
            n_bytes = len(self._rest) - self._rest.endswith(b"\r")
            if n_bytes:
                lines.append(Line(bytes(self._rest[:n_bytes]), is_whole=False))
                del self._rest[:n_bytes]
        return lines

    def close(self) -> list[Line]:
        """The last line, when the stream ends without a line end."""
        rest = bytes(self._rest)
        self._rest.clear()
        return [Line(rest, not self._is_too_long)] if rest else []


class EventReader:
    """Splits an event stream into the data of its events; fields other than `data` are ignored.

    Lines and events with more than `max_bytes` are dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lines = LineReader(max_bytes)
        self._event = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that end in these bytes."""
        events: list[bytes] = []
        for line in self._lines.feed(data):
            self._take(line, events)
        return events

    def close(self) -> list[bytes]:
        """The data of the last event, when the stream ends without a blank line."""
        events: list[bytes] = []
        for line in self._lines.close():
            self._take(line, events)
        self._end_event(events)
        return events

    def _take(self, line: Line, events: list[bytes]) -> None:
        if not line.is_whole:
            return
        if line.data.startswith(DATA_FIELD):
            self._event += line.data[len(DATA_FIELD) :].rstrip(b"\r\n") + b"\n"
            if len(self._event) > self._max_bytes:
                self._event.clear()
        elif line.data in (b"\n", b"\r\n", b"\r"):
            self._end_event(events)

    def _end_event(self, events: list[bytes]) -> None:
        event = bytes(self._event).strip()
        self._event.clear()
        if event:
            events.append(event)
