"""The random codes of the generator for benches and training."""

from __future__ import annotations

import random
import re

from bench.model import text


def test_codes_have_sixteen_characters_and_no_letter_twice() -> None:
    rng = random.Random(1)
    for _ in range(200):
        code = text.code(rng)
        assert re.fullmatch(r"([A-Z]\d){8}", code)
        assert len(set(code[::2])) == 8
