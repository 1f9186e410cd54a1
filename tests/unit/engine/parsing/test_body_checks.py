"""Checks of bodies that are forwarded: parameters, nesting and forms."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from cpu_time import exponent

from evoke_proxy.config import LimitsConfig
from evoke_proxy.core.request.parameters import nesting
from evoke_proxy.engine.parsing import body_checks
from evoke_proxy.engine.parsing.body_checks import check, check_body
from evoke_proxy.errors import RequestError

LIMITS = LimitsConfig()


@pytest.mark.parametrize(
    "escaped", ('{"repeat\\u005flast_n": 2147483647}', '\ufeff{"repeat_last_n": 2147483647}')
)
def test_an_escaped_key_or_a_byte_order_mark_does_not_hide_a_parameter(escaped: str) -> None:
    with pytest.raises(RequestError, match="repeat_last_n is 2147483647"):
        check_body(escaped.encode(), "", LIMITS)


@pytest.mark.parametrize("unit", ('"', '\\"', "[", "[\\", "<", "#", "(", ")", '"\\', "(#\n"))
def test_nesting_takes_linear_time(unit: str) -> None:
    assert exponent(lambda n: nesting(unit.encode() * n), 100_000) < 1.3


def test_a_grammar_in_a_form_is_checked() -> None:
    form, kind = _form(("grammar", b'root ::= ("a"? "b"?){0,125} "b"'))
    with pytest.raises(RequestError, match="limits.grammar_paths"):
        check_body(form, kind, LIMITS)


def _form(*parts: tuple[str, bytes]) -> tuple[bytes, str]:
    lines = b"".join(
        b'--xyz\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), value)
        for name, value in parts
    )
    return lines + b"--xyz--\r\n", 'multipart/form-data; boundary="xyz"'


def _schema(pattern: str) -> tuple[bytes, str]:
    schema = {"type": "string", "pattern": pattern}
    chat = {"response_format": {"json_schema": {"schema": schema}}}
    return json.dumps(chat).encode(), "application/json"


@pytest.mark.parametrize(
    ("body", "is_in_thread"),
    [
        (_schema("(" * 8000), True),
        ((_schema("(" * 8000)[0].replace(b"pattern", b"\\u0070attern"), ""), True),
        ((json.dumps({"grammar": "root ::= " + "a|" * 400}).encode(), ""), True),
        (_form(*[(f"field {number}", b"a|" * 4000) for number in range(31)]), True),
        (_schema("[a-z]+"), False),
        ((json.dumps({"content": "word " * 2000}).encode(), ""), False),
    ],
    ids=["pattern", "escaped key", "grammar", "form", "short pattern", "text"],
)
def test_grammars_that_take_long_are_checked_in_a_thread(
    body: tuple[bytes, str], is_in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pattern of 8,000 bytes took 0.1 s of the event loop before, a form 2 s."""
    threads = []
    monkeypatch.setattr(
        body_checks, "check_body", lambda *_: threads.append(threading.current_thread())
    )
    asyncio.run(check(*body, LIMITS))
    assert [thread is not threading.main_thread() for thread in threads] == [is_in_thread]


def test_the_fields_of_a_form_are_limited_and_its_files_are_not() -> None:
    audio = ('file"; filename="a.wav', b"(" * 100_000)
    check_body(*_form(("prompt", b"hello"), audio), LIMITS)
    deep = ("grammar", b"root ::= " + b"(" * 400)
    for wrong in (deep, ("samplers", b"d" * 10_000), ('grammar"; xfilename="a', b"(" * 400)):
        with pytest.raises(RequestError):
            check_body(*_form(audio, wrong), LIMITS)
    with pytest.raises(RequestError):
        check_body(*_form(*[("samplers", b"d")] * 40), LIMITS)
    check_body(*_form(*[("prompt", b"d" * 7000)] * 2), LIMITS)
    with pytest.raises(RequestError, match="fields of the form"):
        check_body(*_form(*[("prompt", b"d" * 7000)] * 3), LIMITS)
    with pytest.raises(RequestError):
        check_body(b"", "multipart/form-data", LIMITS)
