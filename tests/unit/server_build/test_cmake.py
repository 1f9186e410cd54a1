"""The progress that a long build reports, in a log file and on a terminal."""

from __future__ import annotations

import io

import pytest

from evoke_proxy.server_build.cmake import Progress, percent_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("line", "percent"),
    [
        ("[3/40] Building CXX object src/a.o", 7),
        ("[40/40] Linking CXX executable bin/llama-server", 100),
        ("[  7%] Building C object ggml/a.o", 7),
        ("[100%] Built target llama-server", 100),
        ("[0/1] Re-running CMake...", 0),
        ("[0/0] nothing", 0),
        ("warning: 50% of this", None),
        (" [3/40] indented compiler output", None),
        ("[x%]", None),
        ("", None),
    ],
)
def test_the_percentage_is_read_from_a_line_of_the_build(line: str, percent: int | None) -> None:
    assert percent_of(line) == percent


def test_a_log_file_gets_a_line_every_ten_percent() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock)
    progress.begin("building")
    for done in range(0, 101):
        clock.now += 1
        progress.read_line(f"[{done:3d}%] Building")
    progress.end()
    lines = stream.getvalue().splitlines()
    assert [line.split(": ")[1].split(" %")[0] for line in lines] == [
        str(percent) for percent in range(0, 101, 10)
    ]
    assert lines[0] == "building: 0 % 0:00"
    assert lines[1] == "building: 10 % 0:11, about 2 min left"
    assert lines[9] == "building: 90 % 1:31, about 10 s left"
    assert lines[-1] == "building: 100 % 1:41"


def test_a_terminal_gets_one_line_rewritten() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock)
    progress.begin("building")
    clock.now += 75
    progress.read_line("[1/2] Building")
    progress.end()
    text = stream.getvalue()
    assert text.count("\n") == 1 and text.endswith("\n")
    assert (
        text.split("\r")[-1]
        == f"building [{'#' * 12}{'.' * 12}]  50 % 1:15, about 80 s left\033[K\n"
    )


def test_a_terminal_line_updates_its_time_between_percents() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock)
    progress.begin("building")
    for _ in range(2):
        clock.now += 10
        progress.read_line("[1/300] Building")
    assert [part[-7:-3] for part in stream.getvalue().split("\r")[1:]] == ["0:00", "0:10", "0:20"]


def test_lines_of_a_build_within_the_build_are_ignored() -> None:
    stream = io.StringIO()
    progress = Progress(stream, Clock())
    progress.begin("building")
    for line in ("[30/300] Building", "[1/2] Generating", "[2/2] Linking", "[60/300] Building"):
        progress.read_line(line)
    assert [line.split(": ")[1][:4] for line in stream.getvalue().splitlines()] == [
        "0 % ",
        "10 %",
        "20 %",
    ]


def test_the_time_left_follows_the_measured_speed_of_this_step() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock)
    clock.now += 1000  # time before the step, of a download for example, does not count
    progress.begin("building")
    clock.now += 60
    progress.read_line("[ 10%] Building")
    clock.now += 240
    progress.read_line("[ 20%] Building")
    assert stream.getvalue().splitlines() == [
        "building: 0 % 0:00",
        "building: 10 % 1:00, about 9 min left",
        "building: 20 % 5:00, about 20 min left",
    ]


def test_a_message_gets_a_separate_line() -> None:
    stream = Terminal()
    progress = Progress(stream, Clock())
    progress.begin("building")
    progress.say("starting over")
    progress.read_line("[1/2] after the end, ignored")
    assert stream.getvalue().endswith("\033[K\nstarting over\n")
