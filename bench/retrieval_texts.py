"""The texts of `bench.retrieval`: statements, and questions with the same and with other words.

`{}` stands for a value that every trial draws. No paraphrased question shares a content word with
its statement; a unit test checks that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FactTexts:
    """A statement, a question in its words, and one that means the same in others."""

    fact: str
    lexical: str
    paraphrase: str


FACTS = tuple(
    FactTexts(*line)
    for line in (
        ("I live in a small flat in {}.", "Where is the flat I live in?",
         "What is my home address?"),
        ("My boss is called {}.", "What is my boss called?", "Who do I report to at work?"),
        ("The meeting was moved to {}.", "When was the meeting moved to?",
         "What time should we gather now?"),
        ("Our dog {} is afraid of thunder.", "Which dog is afraid of thunder?",
         "What pet gets scared in storms?"),
        ("The invoice came to {} euros.", "How many euros did the invoice come to?",
         "What amount do we have to pay on the bill?"),
        ("My daughter studies medicine in {}.", "Where does my daughter study medicine?",
         "In which city is my child training as a doctor?"),
        ("The car broke down near {}.", "Where did the car break down?",
         "At what place did the vehicle stop working?"),
        ("I am allergic to {}.", "What am I allergic to?",
         "Which food makes me ill if I eat it?"),
        ("The wifi password is {}.", "What is the wifi password?",
         "How do guests connect to the internet?"),
        ("Grandmother was born in {}.", "When was grandmother born?",
         "What year is my old nan from?"),
        ("The plumber charges {} an hour.", "What does the plumber charge an hour?",
         "How expensive is the man who repairs pipes?"),
        ("We ran out of disk space on {}.", "Where did we run out of disk space?",
         "Which machine has its storage full?"),
        ("The database is backed up every {} hours.",
         "Every how many hours is the database backed up?",
         "How often are copies of our data made?"),
        ("Tests fail on the branch {}.", "On which branch do tests fail?",
         "Where in git is the build red?"),
        ("The key is hidden under the {}.", "What is the key hidden under?",
         "How can I get inside when the door is locked?"),
        ("My favourite author is {}.", "Who is my favourite author?",
         "Whose novels do I enjoy reading most?"),
        ("The flight leaves from gate {}.", "Which gate does the flight leave from?",
         "Where at the airport do we board the plane?"),
        ("The doctor prescribed {} twice a day.", "What did the doctor prescribe twice a day?",
         "Which medicine have I been told to take?"),
        ("We agreed to hire {} as a designer.", "Whom did we agree to hire as a designer?",
         "Which new colleague will do graphics for the team?"),
        ("The treaty was signed in {}.", "Where was the treaty signed?",
         "In what place did the nations make peace?"),
        ("The oven must be set to {} degrees.", "To how many degrees must the oven be set?",
         "What temperature do I bake the bread at?"),
        ("The rent rises to {} next spring.", "What does the rent rise to next spring?",
         "How much will the apartment cost per month?"),
        ("My brother teaches {} at a school.", "What does my brother teach at a school?",
         "Which subject do pupils learn from my sibling?"),
        ("The thief escaped through the {}.", "What did the thief escape through?",
         "How did the burglar get out?"),
        ("Sales dropped by {} percent in autumn.", "By how many percent did sales drop in autumn?",
         "How badly did revenue decline?"),
        ("The server listens on {}.", "What does the server listen on?",
         "Which port do clients connect to?"),
        ("The wedding takes place on {}.", "When does the wedding take place?",
         "What date do they get married?"),
        ("The captain of the ship is {}.", "Who is the captain of the ship?",
         "Which sailor is in command of the vessel?"),
        ("I weigh {} kilos.", "How many kilos do I weigh?", "How heavy am I?"),
        ("The novel has {} chapters.", "How many chapters has the novel?",
         "Into what number of sections is the book divided?"),
        ("The museum closes at {}.", "When does the museum close?",
         "How late can we look at the paintings and exhibits?"),
        ("The bakery on the corner sells {}.", "What does the bakery on the corner sell?",
         "Where nearby could we buy fresh bread?"),
        ("The bug was introduced by {}.", "Who introduced the bug?",
         "Which commit caused the defect in the software?"),
        ("My passport expires on {}.", "When does my passport expire?",
         "Until what date can I travel abroad with this document?"),
        ("The professor retired after {} years.", "After how many years did the professor retire?",
         "How long had the academic worked before leaving the university?"),
        ("The tent sleeps {} people.", "How many people does the tent sleep?",
         "What number of campers fit in our shelter?"),
        ("The cat was found in the {}.", "Where was the cat found?",
         "In what spot did the missing kitten turn up?"),
        ("The engine needs {} litres of oil.", "How many litres of oil does the engine need?",
         "What quantity of lubricant goes in the motor?"),
        ("The lawyer advised us to {}.", "What did the lawyer advise us to do?",
         "Which legal recommendation was given by our attorney?"),
        ("The garden is watered by {}.", "Who waters the garden?",
         "Which neighbour looks after the plants on the lawn?"),
        ("Lunch is served in {}.", "Where is lunch served?",
         "Which room do we eat the midday meal in?"),
        ("The winner of the race was {}.", "Who was the winner of the race?",
         "Which runner finished first in the competition?"),
        ("The bridge can carry {} tonnes.", "How many tonnes can the bridge carry?",
         "What is the heaviest truck that may cross the river?"),
        ("The patient has a fever of {}.", "What fever has the patient?",
         "How high is the sick person's temperature?"),
        ("The film was directed by {}.", "Who directed the film?",
         "Which person made the movie?"),
        ("The company was founded by {}.", "Who founded the company?",
         "Which entrepreneur started the business?"),
        ("The shop accepts only {}.", "What does the shop accept only?",
         "Which payment methods can customers at the store use?"),
        ("The train is delayed by {} minutes.", "By how many minutes is the train delayed?",
         "How late is the railway running?"),
    )
)  # fmt: skip

# Statements with the words of a question bent: another form of the word, or of the identifier.
BENT = (
    ("We configured {} retries for uploads.", "What is the retry configuration of the upload?"),
    ("The committee approved a grant of {}.", "Which grants were approvals by committees?"),
    ("The translator charges {} a page.", "What is the charge for translation per pages?"),
    ("She negotiated a discount of {}.", "How large are the discounts of the negotiation?"),
    ("Deployment happens on {}.", "When do we deploy?"),
    ("The generator consumes {} watts.", "What is the consumption of generators?"),
    ("The parameter maxConnectionCount is {}.", "How many connections at most?"),
    ("requestTimeoutMs = {}", "What is the timeout of a request?"),
    ("The encryption uses {}.", "How are files encrypted?"),
    ("Migrating the tables took {} hours.", "How long was the migration of the table?"),
    ("The subscription renews every {} days.", "When is the renewal of subscriptions?"),
    ("He reviewed {} applications.", "How many were in his review of the application?"),
    ("The sensor calibrates to {}.", "What is the calibration of the sensors?"),
    ("We archived the reports under {}.", "Where is the archive of the report?"),
    ("The validator rejects {}.", "What fails validation?"),
    ("Scheduling is done by {}.", "Who does the schedule?"),
)

SETTINGS = (
    "PORT", "HOST", "RETRIES", "TIMEOUT_MS", "CACHE_SIZE", "LOG_LEVEL", "MAX_USERS", "API_KEY",
    "REGION", "BATCH_SIZE", "QUEUE_LIMIT", "WORKERS",
)  # fmt: skip
FILES = (
    "config.env", "deploy.yaml", "settings.toml", "server.ini", "limits.conf", "cache.json",
    "src/api/routes.py", "src/core/engine.py", "docker/compose.yaml", "tests/conftest.py",
)  # fmt: skip

# Filler: sentences about nothing that is asked, with words that questions have too.
SUBJECTS = (
    "The old harbour", "A quiet village", "The morning paper", "Her younger cousin",
    "A passing tourist", "The local council", "A retired teacher", "The radio host",
    "One of the farmers", "The evening train", "A street musician", "The national library",
    "A careful reader", "The second report", "An early customer", "The mountain path",
)  # fmt: skip
VERBS = (
    "was mentioned in", "has often talked about", "once wrote about", "reminds people of",
    "was painted during", "has little to do with", "became known for", "was compared to",
    "never quite matched", "grew out of", "is older than", "changed because of",
)  # fmt: skip
OBJECTS = (
    "the long winter", "a forgotten song", "the price of coffee", "a book about birds",
    "the colour of the sea", "an argument over chess", "the history of paper",
    "a walk in the hills", "the sound of rain", "the first snow of the year",
    "an exhibition of maps", "the taste of apples", "a letter from abroad",
    "the opening of the park", "a game of cards", "the light in October",
)  # fmt: skip
