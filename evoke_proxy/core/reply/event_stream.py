"""Splits event streams (Server-Sent Events) that arrive in chunks into lines and events."""

from __future__ import annotations

from typing import NamedTuple

DATA_FIELD = b"data:"


class Line(NamedTuple):
    """A line of a stream, or a part of a line that is too long to keep."""

    # The bytes with their line end; the last line of a stream may lack it.
    data: bytes
    # False for the parts of a line that is longer than the limit of its reader.
    is_complete: bool = True


class LineReader:
    """Splits bytes into lines that end with LF, CRLF or CR; keeps at most one line in memory.

    The joined data of all lines equal the bytes that were fed. A line of more than `max_bytes` is
    returned in parts as they arrive.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()
        self._is_too_long = False

    def feed(self, data: bytes) -> list[Line]:
        """Add bytes, and return the lines that end in them.

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
                is_complete = not self._is_too_long and len(piece) <= self._max_bytes
                self._is_too_long = False
                lines.append(Line(piece, is_complete))
        if self._is_too_long or len(self._rest) > self._max_bytes:
            self._is_too_long = True
            n_bytes = len(self._rest) - self._rest.endswith(b"\r")
            if n_bytes:
                lines.append(Line(bytes(self._rest[:n_bytes]), is_complete=False))
                del self._rest[:n_bytes]
        return lines

    def close(self) -> list[Line]:
        """End the stream, and return the last line if it has no line end."""
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
        """Add bytes, and return the data of the events that end in them."""
        events: list[bytes] = []
        for line in self._lines.feed(data):
            self._process(line, events)
        return events

    def close(self) -> list[bytes]:
        """End the stream, and return the data of the last event if no blank line follows it."""
        events: list[bytes] = []
        for line in self._lines.close():
            self._process(line, events)
        self._end_event(events)
        return events

    def _process(self, line: Line, events: list[bytes]) -> None:
        if not line.is_complete:
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
