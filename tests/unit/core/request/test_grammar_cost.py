"""The estimated cost of a grammar: high for those that hang llama-server, low for useful ones."""

from __future__ import annotations

import pytest
from cpu_time import exponent

from evoke_proxy.core.request.grammar_cost import grammar_cost, pattern_cost
from evoke_proxy.server_build.cache import cache_dir

LIMIT = 4096
# Each kept the main loop of llama-server busy for more than 20 seconds.
CHAIN = "root ::= s0\n" + "\n".join(f"s{i} ::= s{i + 1} n" for i in range(100))
HANGING = (
    "root ::= " + "x " * 500 + '\nx ::= "a"?',
    "root ::= " + "y " * 25 + "\ny ::= " + "x " * 25 + '\nx ::= "a"?',
    'root ::= ("a"? "b"?){0,125} "b"',
    'root ::= "c" ("a"? "b"?){125} "b"',
    "root ::= " + "x " * 500 + "\nx ::= [a-z]* | y\ny ::= ",
    CHAIN + '\ns100 ::= "a"\nn ::= "b"? "b"?',
)
USEFUL = (
    'root ::= "a"{0,2000} "b"',
    "root ::= " + " ".join(f'"{i}" ws' for i in range(500)) + "\nws ::= [ \\t]*",
    "root ::= " + " | ".join(f'"{i}"' for i in range(3000)),
    'root ::= expr\nexpr ::= term ws ("+" ws expr ws)?\nterm ::= [0-9]+\nws ::= " "*',
)


@pytest.mark.parametrize("grammar", HANGING)
def test_a_grammar_with_many_optional_parts_is_above_the_limit(grammar: str) -> None:
    assert grammar_cost(grammar) > LIMIT


@pytest.mark.parametrize("grammar", USEFUL)
def test_a_useful_grammar_is_below_the_limit(grammar: str) -> None:
    assert 0 < grammar_cost(grammar) <= LIMIT


GRAMMARS = sorted(cache_dir().glob("source/*/grammars/*.gbnf"))


@pytest.mark.skipif(not GRAMMARS, reason="the source of llama.cpp is not in the cache")
def test_the_grammars_of_llama_cpp_are_far_below_the_limit() -> None:
    costs = {path.name: grammar_cost(path.read_text()) for path in GRAMMARS}
    assert all(0 < cost < 100 for cost in costs.values()), costs


def test_optional_parts_multiply_the_cost_and_others_do_not() -> None:
    assert grammar_cost('root ::= "a" "b" "c"') == 1
    assert grammar_cost('root ::= "a" | "b" | "c"') == 3
    assert grammar_cost('root ::= "a"? "b"? "c"') == 9
    assert grammar_cost('root ::= ("a" | "b")? "c"') == 2 * 3
    assert grammar_cost("root ::= ") == grammar_cost("") == 0


@pytest.mark.parametrize(
    ("pattern", "cost"), [("^abc$", 1), ("^a?b?$", 4), ("^(?:a|b)c$", 2), (r"^\(?[(]?a$", 9)]
)
def test_a_pattern_has_the_cost_of_its_grammar(pattern: str, cost: int) -> None:
    assert pattern_cost(pattern) == cost


UNITS = ("x ", "(", "(a)", '"a"? ', "| ", "a ::= b? ", "{1,", "#", "<", "[\\", '"', "x{0,9} ", "a-")


@pytest.mark.parametrize("unit", UNITS)
def test_the_estimate_takes_linear_time(unit: str) -> None:
    assert exponent(lambda n: grammar_cost(unit * n), 1000) < 1.3
