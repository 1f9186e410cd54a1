"""The word lists of the corpus, in the order the generator draws from them.

The order matters: a seed gives the same corpus only while the lists stay as they are.
"""

from __future__ import annotations

NAMES = (
    "Priya Omar Lena Marco Ingrid Tomas Yuki Nadia Felix Amara Boris Carla Dmitri Elena Farid "
    "Greta Hugo Irene Jonas Kira Liam Mina Noah Olga Pablo Quinn Rosa Sven Tara Umar Vera "
    "Walter Xenia Yara Zane Alice Bob Carol Dave Erin Frank Grace Heidi Ivan Judy Karl Laura "
    "Mike Nina Oscar Peter Ruth Sam Tina Uma Victor Wendy Anna Ben Chloe"
).split()
PLACES = (
    "Lisbon Oslo Paris Rome Berlin Madrid Tokyo Cairo Lima Quito Delhi Seoul Dublin Athens "
    "Vienna Prague Warsaw Zurich Geneva Boston Denver Austin Dallas Miami Seattle Toronto "
    "Sydney Perth Nairobi Lagos Accra Tunis Dakar Havana Bogota Santiago Hanoi Manila Jakarta "
    "Riga"
).split()
THINGS = (
    "vault office lab warehouse server garage studio archive depot station clinic library "
    "hangar tower kitchen basement gate cabin locker router printer safe elevator bunker dock "
    "workshop hotel museum bridge market"
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
ENV_KEYS = (
    "PORT TIMEOUT RETRIES BATCH_SIZE SEED WORKERS LIMIT DEPTH MAX_USERS CACHE_SIZE BUFFER "
    "VERSION OFFSET LEVEL WIDTH HEIGHT RATE BUILD_ID QUOTA TTL"
).split()
ENV_PREFIXES = ("API DB WEB APP LOG AUTH MAIL JOB NET DISK GPU TEST").split()
FILE_STEMS = (
    "config settings main server utils client app db worker deploy test build setup routes models"
).split()
FILE_SUFFIXES = (".py .toml .yaml .json .ini .env .cfg").split()
FREE_NOUNS = ("code number name key date word level ID mode rank").split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
ONSETS = ("b c d f g h k l m n p r s t v z br dr tr st kl").split()
VOWELS = ("a e i o u ai ou").split()
CODAS = ("n r l s x m k t nd rk").split()
PREPOSITIONS = (
    "near the;under the;behind the;across the;inside the;beyond the;along the;around the"
).split(";")
NUMBER_ATTRIBUTES = (
    "favorite number;lucky number;badge number;employee number;room number;seat number;"
    "bus number;jersey number;order number;ticket number;account number;flat number;"
    "ID number;phone extension;PIN"
).split(";")
WORD_ATTRIBUTES = (
    "favorite color;favorite animal;password;nickname;code name;username;team name;"
    "secret word;project name;locker;parking spot;desk;call sign;pet's name;street"
).split(";")
CODE_ATTRIBUTES = (
    "license key;booking code;tracking number;activation code;API token;confirmation code;"
    "device ID;membership code;coupon code;license plate;reservation code;recovery code;"
    "customer ID;session ID"
).split(";")
DATE_ATTRIBUTES = (
    "birthday;appointment date;deadline;start date;renewal date;flight date;due date;"
    "exam date;delivery date"
).split(";")
PLACE_ATTRIBUTES = (
    "access code;door code;passphrase;serial number;IP suffix;key code;reset code;budget;"
    "port number;inventory number;alarm code;Wi-Fi password;gate number;phone number;"
    "reference"
).split(";")
RECORD_FIELDS = (
    "total;status;price;weight;owner code;quantity;size;score;rating;balance;version;length;"
    "latency;capacity;speed"
).split(";")
RECORDS = (
    "order;invoice;parcel;ticket;batch;device;sensor;shipment;job;build;sample;container"
).split(";")
EVENTS = ("meeting;interview;lunch;review;call;workshop;dinner;appointment").split(";")
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
    ("Hi", "Hello!"),
    ("Thanks!", "You are welcome."),
    ("Good morning.", "Good morning!"),
    ("What is the opposite of hot?", "Cold."),
    ("Which animal barks?", "A dog."),
    ("How many legs does a spider have?", "Eight."),
    ("What is ice made of?", "Water."),
    ("Can you help me?", "Yes, of course."),
    ("What is the largest ocean?", "The Pacific."),
    ("Who are you?", "I am a small assistant."),
    ("Say yes.", "Yes."),
    ("Tell me a joke.", "I only know short ones."),
    ("What is the boiling point of water?", "One hundred degrees."),
    ("Is the sun a star?", "Yes, it is."),
    ("Which month comes after May?", "June."),
]
ACKNOWLEDGEMENTS = [
    "Got it.",
    "OK.",
    "Noted.",
    "I will remember that.",
    "Understood.",
]
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a careful assistant. Answer from the conversation.",
    "You are a small assistant. Be brief.",
    "Answer briefly. If you do not know, say so.",
]
STATEMENT_PREFIXES = [
    "",
    "",
    "",
    "",
    "Remember: ",
    "Please remember that ",
    "Note: ",
    "FYI, ",
    "By the way, ",
    "For later: ",
    "Just so you know, ",
    "Keep in mind that ",
]
QUESTION_PREFIXES = [
    "",
    "",
    "",
    "",
    "",
    "Remind me: ",
    "Quick question: ",
    "Do you remember? ",
]
UNKNOWN = "I don't know."
