"""The word lists of the corpus; a seed gives the same corpus while the lists stay the same."""

from __future__ import annotations

NAMES = (
    "Priya Omar Lena Marco Ingrid Tomas Yuki Nadia Felix Amara Boris Carla Dmitri Elena Farid "
    "Greta Hugo Irene Jonas Kira Liam Mina Noah Olga Pablo Quinn Rosa Sven Tara Umar Vera "
    "Walter Xenia Yara Zane Alice Bob Carol Dave Erin Frank Grace Heidi Ivan Judy Karl Laura "
    "Mike Nina Oscar Peter Ruth Sam Tina Uma Victor Wendy Anna Ben Chloe"
).split()
COLORS = (
    "blue red green amber violet silver golden black white orange pink gray teal crimson ivory "
    "indigo scarlet olive bronze coral"
).split()
ANIMALS = (
    "falcon otter tiger raven badger lynx heron wolf panda gecko bison cobra dolphin eagle "
    "ferret hippo iguana jaguar koala lemur"
).split()
ADJECTIVES = (
    "old small large quiet bright heavy simple modern ancient narrow wide gentle rapid common "
    "rare distant local warm cold deep empty broken useful famous strange careful slow busy "
    "wooden metal clean dark fresh early late"
).split()
NOUNS = (
    "river mountain machine garden letter engine window teacher forest market bridge village "
    "painting computer storm ship story bird street lamp farmer road castle clock table doctor "
    "field train island library worker song valley report system city child house tree stone "
    "coffee bread book plan signal cable tool wheel harbor festival lesson planet ocean desert "
    "battery"
).split()
VERBS = (
    "follows watches repairs carries finds builds crosses describes supports moves covers opens "
    "shapes reaches protects changes measures joins paints studies needs helps visits cleans "
    "records explains"
).split()
ADVERBS = ("slowly quickly often rarely usually carefully sometimes always quietly today").split()
PREPOSITIONS = (
    "near the;under the;behind the;across the;inside the;beyond the;along the;around the"
).split(";")
SETTINGS = (
    "PORT TIMEOUT RETRIES SEED WORKERS LIMIT DEPTH BUFFER VERSION OFFSET LEVEL WIDTH HEIGHT RATE "
    "QUOTA TTL"
).split()
CODE_SETTINGS = ("SEED", "VERSION", "BUFFER")  # their values are codes, those of the rest numbers
FILE_STEMS = (
    "config settings main server utils client app db worker deploy test build setup routes models"
).split()
FILE_SUFFIXES = (".py .toml .yaml .json .ini .env .cfg").split()
NUMBER_ATTRIBUTES = (
    "favorite number;lucky number;badge number;employee number;room number;seat number;"
    "bus number;jersey number;order number;ticket number;account number;flat number;"
    "ID number;phone extension;PIN"
).split(";")
PAIR_ATTRIBUTES = (
    "favorite color;favorite animal;password;nickname;code name;username;team name;"
    "secret word;project name;locker;parking spot;desk;call sign;street"
).split(";")
# One token each before "code": words spelled in pieces with the same end are told apart worse.
CODE_ATTRIBUTES = (
    "access code;alarm code;door code;gate code;vault code;safe code;router code;printer code;"
    "server code;elevator code;garage code;studio code;office code;device code"
).split(";")
# Attribute -> the same question without any of its words. Values: pairs, and numbers.
PAIR_PARAPHRASES = {
    "residence": "Where do I live?",
    "occupation": "What do I do for a living?",
    "spouse": "Who am I married to?",
    "automobile": "Which car do I drive?",
    "birthplace": "Where was I born?",
    "physician": "Which doctor treats me?",
    "destination": "Where am I going on holiday?",
    "employer": "Which company do I work for?",
    "hobby": "What do I like to do for fun?",
    "breakfast": "What do I eat in the morning?",
    "instrument": "What music do I play?",
    "university": "Where did I study?",
    "allergy": "Which food makes me ill?",
    "landlord": "Who owns the house I rent?",
    "tutor": "Who teaches me?",
}
NUMBER_PARAPHRASES = {
    "salary": "How much do I earn?",
    "debt": "How much money do I owe?",
    "weight": "How heavy am I?",
    "height": "How tall am I?",
    "bedtime": "When do I go to sleep?",
    "donation": "How much did I give to charity?",
    "mileage": "How far have I driven?",
    "seniority": "How long have I been with the company?",
}
SMALL_TALK = [
    ("What is the capital of France?", "Paris."),
    ("What is the capital of Italy?", "Rome."),
    ("What is two plus two?", "Four."),
    ("What color is the sky?", "Blue."),
    ("How many days are in a week?", "Seven."),
    ("Is water wet?", "Yes."),
    ("Name a fruit.", "Apple."),
    ("Name a planet.", "Mars."),
    ("What do bees make?", "Honey."),
    ("How are you?", "I am fine, thank you."),
    ("Hello!", "Hello! How can I help you?"),
    ("Thanks!", "You are welcome."),
    ("Good morning.", "Good morning!"),
    ("What is the opposite of hot?", "Cold."),
    ("Which animal barks?", "A dog."),
    ("How many legs does a spider have?", "Eight."),
    ("What is ice made of?", "Water."),
    ("Can you help me?", "Yes, of course."),
    ("What is the largest ocean?", "The Pacific."),
    ("Who are you?", "I am a small assistant."),
    ("Tell me a joke.", "I only know short ones."),
    ("Is the sun a star?", "Yes, it is."),
    ("Which month comes after May?", "June."),
]
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a small assistant. Be brief.",
]
STATEMENT_PREFIXES = ["", "", "", "", "", "", "", "Remember: ", "Note: ", "By the way, "]
FACT_REPLY, CHAT_REPLY, FILE_REPLY = (
    "Got it.",
    "I see.",
    "Done.",
)  # answers to facts, to anything else, to files
UNKNOWN = "I don't know."
