"""Attributes and questions that no training row of the bundled model has, and formats of answers.

Training must not use them: tests/unit/bench/test_unseen.py compares them with the word lists.
"""

from __future__ import annotations

from collections.abc import Mapping

# Attribute -> a question without any of its words. Values are pairs, and numbers.
PAIR_ATTRIBUTES: Mapping[str, str] = {
    "boat": "What do I sail on?",
    "hometown": "From which place am I?",
    "neighbor": "Who lives next door to me?",
    "brother": "Who is my sibling?",
    "dentist": "Who looks after my teeth?",
    "band": "Which musicians do I listen to?",
    "pet": "Which animal lives with me?",
    "lawyer": "Who would represent me in court?",
    "favorite fruit": "What do I like best from the orchard?",
    "dream job": "What would I like to become?",
    "school": "Where did I learn to read?",
    "sport": "How do I keep fit?",
    "perfume": "What do I smell of?",
    "newspaper": "Where do I read the news?",
    "barber": "Who cuts my hair?",
    "religion": "What do I believe in?",
    "bicycle": "What do I ride to work?",
    "favorite drink": "What should the waiter bring me?",
    "costume": "What do I wear at the carnival?",
}
NUMBER_ATTRIBUTES: Mapping[str, str] = {
    "shoe size": "How big are my feet?",
    "house number": "At which door of the street do I live?",
    "tax number": "How does the revenue office identify me?",
    "age": "How old am I?",
    "rent": "What do I pay for my flat each month?",
    "budget": "How much may I spend?",
    "phone number": "How can you call me?",
    "score": "How many points do I have?",
    "flight number": "Which plane do I take?",
    "license number": "What is printed on my driving permit?",
    "table number": "Where do I sit in the restaurant?",
    "pension": "What do I get when I am retired?",
    "library number": "With which card do I borrow books?",
    "pulse": "How fast does my heart beat?",
    "deposit": "What did I leave with the bank?",
    "year of birth": "When was I a newborn?",
    "jump record": "How far have I leapt at best?",
}
# Attributes of the training, each with a question that training does not have.
NEW_QUESTIONS: Mapping[str, str] = {
    "residence": "In which place is my home?",
    "occupation": "Which work do I do?",
    "spouse": "Who did I marry?",
    "automobile": "What stands in my garage?",
    "birthplace": "Where did I come into the world?",
    "physician": "Who do I see when I am ill?",
    "destination": "Where will I spend my vacation?",
    "employer": "Who pays my wages?",
    "hobby": "How do I spend my free time?",
    "breakfast": "With what do I begin the day at the table?",
    "instrument": "What can I be heard playing in the orchestra?",
    "university": "Which place gave me my degree?",
    "allergy": "What must I never be served?",
    "landlord": "Who gets my rent?",
    "tutor": "Who gives me lessons?",
    "salary": "What does my company pay me?",
    "debt": "What must I still pay back?",
    "weight": "What does the scale say when I step on it?",
    "height": "How high do I reach from head to toe?",
    "bedtime": "At what hour do I turn off the lamp?",
    "donation": "What have I given to the poor?",
    "mileage": "What does the counter of my car say?",
    "seniority": "Since when have I had my job?",
    "password": "What do I type in to log in?",
    "nickname": "What do my friends call me?",
    "badge number": "What is on the card that I wear at work?",
    "room number": "Where in the hotel am I staying?",
    "phone extension": "How can one dial me at the office?",
    "parking spot": "Where do I leave my car?",
    "bus number": "What do I take to go to town?",
    "seat number": "Where do I sit in the theater?",
    "door code": "What opens the entrance?",
    "alarm code": "What silences the siren?",
    "PIN": "What do I enter at the cash machine?",
}
# How an answer begins. `key` is that of the training; the others do not name the key first.
FORMATS: Mapping[str, str] = {
    "key": "",
    "bare": "It is",
    "thought": "Let me think about what you have said. So the value that you ask for is",
}
