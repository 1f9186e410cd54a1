"""Reduces English words to stems, so that forms of one word match.

Porter, "An algorithm for suffix stripping" (1980), steps 1 to 5; then a step that joins nouns
with their verbs and adjectives where these steps leave them apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from string import ascii_lowercase

# Words of other lengths are their own stems.
_MIN_CHARS, _MAX_CHARS = 3, 40
_CACHED_WORDS = 1 << 15

# Endings and their replacements in steps 2 and 3, and endings that step 4 removes.
_STEP_2 = dict(
    (
        *(
            ("ational", "ate"),
            ("tional", "tion"),
            ("enci", "ence"),
            ("anci", "ance"),
            ("izer", "ize"),
        ),
        *(("abli", "able"), ("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous")),
        *(
            ("ization", "ize"),
            ("ation", "ate"),
            ("ator", "ate"),
            ("alism", "al"),
            ("iveness", "ive"),
        ),
        *(
            ("fulness", "ful"),
            ("ousness", "ous"),
            ("aliti", "al"),
            ("iviti", "ive"),
            ("biliti", "ble"),
        ),
    )
)
_STEP_3 = dict(
    (
        *(("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic")),
        *(("ful", ""), ("ness", "")),
    )
)
_STEP_4 = frozenset(
    (
        *("al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion"),
        *("ou", "ism", "ate", "iti", "ous", "ive", "ize"),
    )
)
# Ends of stems of nouns, and those of their verbs and adjectives: decision and decide, complaint
# and complain, allergy and allergic.
_NOUNS = {
    **{"cis": "cid", "lus": "lud", "vas": "vad", "plos": "plod", "rus": "rud", "pans": "pand"},
    **{"hens": "hend", "plaint": "plain", "straint": "strain", "ergi": "erg", "egi": "eg"},
    **{"ogi": "og", "omi": "om", "emi": "em"},
}
# Length of the longest of these endings.
_MAX_ENDING = 7
# Vowels and consonants, except for y, which may be either.
_FORMS = str.maketrans({letter: "v" if letter in "aeiou" else "c" for letter in ascii_lowercase})


@lru_cache(_CACHED_WORDS)
def stem(word: str) -> str:
    """Return the stem of a word in lower case.

    A word of fewer than 3 or more than 40 characters, or with other characters than a to z, is its
    own stem.
    """
    if not _MIN_CHARS <= len(word) <= _MAX_CHARS or not (word.isascii() and word.isalpha()):
        return word
    word = _without_plural(word)
    word = _without_participle(word)
    if word.endswith("y") and _has_vowel(word[:-1]):
        word = word[:-1] + "i"
    word = _replaced(_replaced(word, _STEP_2), _STEP_3)
    word = _without_suffix(word)
    return _joined(_without_final(word))


def _form(word: str) -> str:
    """Return `v` for each vowel and `c` for each consonant; y after a consonant is a vowel."""
    if "y" not in word:
        return word.translate(_FORMS)
    form = ""
    for letter in word:
        is_vowel = letter in "aeiou" or (letter == "y" and form.endswith("c"))
        form += "v" if is_vowel else "c"
    return form


def _measure(word: str) -> int:
    """Return m of the form [C](VC){m}[V], in runs of vowels and consonants."""
    return _form(word).count("vc")


def _has_vowel(word: str) -> bool:
    """Return whether a word contains a vowel: condition *v* of the paper."""
    return "v" in _form(word)


def _ends_cvc(word: str) -> bool:
    """Return condition *o: the word ends with consonant, vowel, consonant, but not in w, x or y."""
    return _form(word).endswith("cvc") and word[-1] not in "wxy"


def _without_plural(word: str) -> str:
    """Remove a plural ending: step 1a."""
    if word.endswith(("sses", "ies")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _without_participle(word: str) -> str:
    """Remove `ed` or `ing`, and restore the end of the stem: step 1b."""
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    suffix = next((s for s in ("ed", "ing") if word.endswith(s)), "")
    rest = word[: -len(suffix)] if suffix else ""
    if not rest or not _has_vowel(rest):
        return word
    if rest.endswith(("at", "bl", "iz")):
        return rest + "e"
    if len(rest) > 1 and rest[-1] == rest[-2] and rest[-1] not in "aeioulsz":
        return rest[:-1]
    return rest + "e" if _measure(rest) == 1 and _ends_cvc(rest) else rest


def _ending(word: str, endings: Collection[str]) -> str:
    """Return the longest of the endings that a word has; "" when it has none."""
    for length in range(_MAX_ENDING, 1, -1):
        if word[-length:] in endings:
            return word[-length:]
    return ""


def _replaced(word: str, endings: Mapping[str, str]) -> str:
    """Replace the longest matching ending if the rest has a measure above 0: steps 2 and 3."""
    found = _ending(word, endings)
    if not found:
        return word
    rest = word[: -len(found)]
    return rest + endings[found] if _measure(rest) > 0 else word


def _without_suffix(word: str) -> str:
    """Remove the longest matching suffix if the rest has a measure above 1: step 4."""
    suffix = _ending(word, _STEP_4)
    rest = word[: -len(suffix)] if suffix else word
    if not suffix or _measure(rest) <= 1:
        return word
    return word if suffix == "ion" and not rest.endswith(("s", "t")) else rest


def _without_final(word: str) -> str:
    """Remove a final `e`, and one of two final `l`: step 5."""
    if word.endswith("e"):
        rest = word[:-1]
        if _measure(rest) > 1 or (_measure(rest) == 1 and not _ends_cvc(rest)):
            word = rest
    return word[:-1] if word.endswith("ll") and _measure(word) > 1 else word


def _joined(word: str) -> str:
    """Return the stem of the verb or adjective of a noun; see `_NOUNS`."""
    found = _ending(word, _NOUNS)
    return word[: -len(found)] + _NOUNS[found] if found and _measure(word) > 1 else word
