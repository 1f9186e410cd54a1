"""The lists of the corpus, from `lists.toml`; a seed gives the same corpus while these stay."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LISTS: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("lists.toml").read_text("utf-8"))
Words = Sequence[str]
Questions = Mapping[str, str]  # by attribute

NAMES: Words = _LISTS["names"]
COLORS: Words = _LISTS["colors"]
ANIMALS: Words = _LISTS["animals"]
ADJECTIVES: Words = _LISTS["adjectives"]
NOUNS: Words = _LISTS["nouns"]
VERBS: Words = _LISTS["verbs"]
ADVERBS: Words = _LISTS["adverbs"]
PREPOSITIONS: Words = _LISTS["prepositions"]
SETTINGS: Words = _LISTS["settings"]
CODE_SETTINGS: Words = _LISTS["code_settings"]
FILE_STEMS: Words = _LISTS["file_stems"]
FILE_SUFFIXES: Words = _LISTS["file_suffixes"]
NUMBER_ATTRIBUTES: Words = _LISTS["number_attributes"]
PAIR_ATTRIBUTES: Words = _LISTS["pair_attributes"]
CODE_ATTRIBUTES: Words = _LISTS["code_attributes"]
PAIR_PARAPHRASES: Questions = _LISTS["pair_paraphrases"]
NUMBER_PARAPHRASES: Questions = _LISTS["number_paraphrases"]
SMALL_TALK: Sequence[tuple[str, str]] = [(said, answer) for said, answer in _LISTS["small_talk"]]
SYSTEM_PROMPTS: Words = _LISTS["system_prompts"]
STATEMENT_PREFIXES: Words = _LISTS["statement_prefixes"]
# Attributes and questions that training must not have.
UNSEEN_PAIRS: Questions = _LISTS["unseen"]["pair_attributes"]
UNSEEN_NUMBERS: Questions = _LISTS["unseen"]["number_attributes"]
NEW_QUESTIONS: Questions = _LISTS["unseen"]["new_questions"]
# The assistant's answers to facts, to anything else, to files, and where it does not know.
FACT_REPLY, CHAT_REPLY, FILE_REPLY, UNKNOWN = "Got it.", "I see.", "Done.", "I don't know."
