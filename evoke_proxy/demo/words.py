"""The vocabulary of the demo's session: a part of what the bundled model was trained on.

The model is small and knows its own synthetic world only (see models/MODEL_CARD.md): names, places
and sentence frames outside these lists are answered with nonsense. The lists leave out whatever
could look like a second fact (numbers, rooms, file keys).
"""

from __future__ import annotations

NAMES = tuple(
    "Priya Omar Lena Marco Ingrid Tomas Yuki Nadia Felix Amara Boris Carla Dmitri Elena Greta Hugo "
    "Irene Jonas Kira Liam Mina Noah Olga Pablo Rosa Sven Tara Vera Walter Alice Bob Carol Dave "
    "Erin Frank Grace Heidi Ivan Judy Karl Laura Mike Nina Oscar Peter Ruth Tina Victor Wendy "
    "Anna Ben Chloe".split()
)
COLORS = tuple(
    "blue red green amber violet silver golden black white orange pink gray teal crimson ivory "
    "indigo scarlet olive bronze coral".split()
)
ANIMALS = tuple(
    "falcon otter tiger raven badger lynx heron wolf panda gecko bison cobra dolphin eagle ferret "
    "hippo iguana jaguar koala lemur".split()
)
ADJECTIVES = tuple(
    "old small large quiet bright heavy simple modern ancient narrow wide gentle rapid common rare "
    "distant local warm cold deep empty broken useful famous strange careful slow busy wooden "
    "metal clean dark fresh early late".split()
)
NOUNS = tuple(
    "river mountain machine garden letter engine window teacher forest market bridge village "
    "painting computer storm ship story bird street lamp farmer road castle clock table doctor "
    "field train island library worker song valley report system city child house tree stone "
    "coffee bread book plan signal cable tool wheel harbor festival lesson planet ocean desert "
    "battery".split()
)
VERBS = tuple(
    "follows watches repairs carries finds builds crosses describes supports moves covers opens "
    "shapes reaches protects changes measures joins paints studies needs helps visits cleans "
    "records explains".split()
)
ADVERBS = tuple(
    "Slowly Quickly Often Rarely Usually Carefully Sometimes Always Quietly Today".split()
)
PREPOSITIONS = (
    "near the",
    "under the",
    "behind the",
    "across the",
    "inside the",
    "beyond the",
    "along the",
    "around the",
)
NUMBER_ATTRIBUTES = (
    "favorite number",
    "lucky number",
    "badge number",
    "employee number",
    "seat number",
    "jersey number",
    "order number",
    "ticket number",
    "account number",
    "ID number",
    "phone extension",
)
WORD_ATTRIBUTES = (
    "password",
    "nickname",
    "code name",
    "username",
    "team name",
    "secret word",
    "project name",
    "call sign",
)
SMALL_TALK = (
    "What is the capital of France?",
    "What is the capital of Italy?",
    "What color is the sky?",
    "Is water wet?",
    "Name a fruit.",
    "Name a planet.",
    "What do bees make?",
    "Good morning.",
    "Which animal barks?",
    "What is ice made of?",
    "What is the largest ocean?",
    "Is the sun a star?",
    "Which month comes after May?",
)
