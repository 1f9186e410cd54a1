"""Questions in other words about the attributes of the training, several for each.

None may be one of `unseen.py`, nor have the same content words (tests/unit/bench/model).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def _table(lines: str) -> Mapping[str, Sequence[str]]:
    """Return the questions by attribute; a line that begins with a space goes on with the last."""
    found = {}
    for line in lines.strip().replace("\n ", "").splitlines():
        attribute, said = line.split(": ", 1)
        found[attribute] = [f"{question.strip()}?" for question in said.split("?") if question]
    return found


WORDINGS = _table(
    """
residence: Where is my house? What is my home address? Where do I stay? Where is my apartment? To
  which address do you send my mail? Which city do I inhabit? Where have I settled?
occupation: What is my job? What is my profession? How do I make money? As what am I employed?
  What is my calling? What is my trade?
spouse: Who is my wife? Who is my husband? With whom did I have my wedding? Who is my partner?
  Whom did I wed? To whom am I wed? Who is my better half?
automobile: What is my car? Which vehicle is mine? What do I drive? What is parked at my house?
  What kind of car have I bought? What takes me over the highway?
birthplace: In which town was I born? Where was my birth? Where was my mother when I was born?
  Where did my life begin? Where am I from by birth?
physician: Who is my doctor? Who examines me? Whom do I call when I am sick? Who writes my
  prescriptions? Who gives me medicine? Whose patient am I?
destination: Where is my trip going? Where am I traveling? Where do I fly this summer? Where does
  my journey end? Where do I go on vacation? What is the goal of my trip?
employer: Who employs me? Who gives me work and pay? Who is my boss? Which firm hired me? Who pays
  me? Where am I on the payroll?
hobby: What is my pastime? What do I do on weekends? What do I enjoy doing? What do I do when I am
  not working? What is my leisure activity? What do I do in spare hours?
breakfast: What is my morning meal? What do I have after I wake up? What is on my plate at dawn?
  What do I eat first? What do I have with my morning coffee?
instrument: What do I play in the band? On what do I make music? What do I practice for the
  concert? What music lessons do I take? What do I play on stage?
university: Which college did I attend? Where did I graduate? Where did I get my diploma? Where
  was I a student? At which college are my professors? Where did I take my exams?
allergy: What can I not eat? Which food is bad for me? What makes me sneeze? To what do I react
  badly? What should be left out of my food? What must not be in my meal?
landlord: Who owns my apartment? From whom do I rent? To whom does my flat belong? Who owns the
  place I live in? Whose tenant am I?
tutor: Who is my teacher? Who helps me learn? With whom do I study? Who explains my homework? Who
  instructs me? Who coaches me?
salary: What is my pay? What are my wages? How much money do I make? What is my income? How much
  am I paid? How much does my job bring in?
debt: How much do I have to repay? What do I owe? How much did I borrow? How large is my loan? How
  much is left of my loan?
weight: How many kilos am I? What do I weigh? How many pounds do I have? What does the balance
  show for me? How light am I?
height: How many inches am I? How big am I? How long is my body? How far is my head from the
  floor? How far up is my crown?
bedtime: When do I sleep? When do I go to bed? At what time do I lie down? When is my day over?
  When should it be dark in my room? When do I fall asleep?
donation: What did I give away? How much did the charity get from me? How much do I give to
  others? What did I give the church? How large was my gift to charity?
mileage: How many miles have I driven? What distance is on my car? How many kilometers did I do?
  How many miles does my vehicle have? How far did I drive?
seniority: How many days have I worked here? How long am I in this job? For how long do I work in
  the firm? How many years of service do I have? How long ago was I hired?
password: How do I sign in? What is my secret for the login? With what do I unlock my account?
  What do I need to log on? What protects my account?
nickname: How do people call me for short? What is my pet name? How am I called by my pals? By
  what short name do you know me? Who am I to my pals?
badge number: What is printed on my badge? Which digits does my badge show? What does my staff
  card say? What number do I wear at the office? What does the guard read on my jacket?
room number: In which room am I? Which door is mine in the hotel? Where do I sleep in the hotel?
  Which digits are on the key of my room? Which room did I book?
phone extension: How do you reach my desk by telephone? What do you dial after the main line?
  Which extension is mine? Which digits ring my telephone? What number rings at my desk?
parking spot: Where is my car parked? Which place in the garage is mine? Where can I park? Where
  do I put my vehicle? Where did I park?
bus number: Which bus do I ride? What bus goes to my house? On which line do I ride? Which line
  brings me home? Which bus stops at my door?
seat number: Which chair is mine? Which seat did I book? Where do I sit on the train? Where do I
  sit in the plane? What is my place in the row?
door code: How do I open the door? What do I type at the door? How do I get into the building?
  Which keys do I press at the door? How can I enter the house?
alarm code: How do I turn off the alarm? What stops the alarm? How is the alarm set? What do I
  type when the alarm rings? How do I disarm the house?
PIN: What secret digits belong to my card? Which digits unlock my phone? What do I type at the
  bank? Which digits do I need to pay? What do I type after the card?
favorite color: Which color do I like best? What paint would I choose? In what color should I
  paint my room? Which color do I love?
favorite animal: Which animal do I like best? Which animal do I love? What creature would I
  choose? Which beast do I like most?
username: How am I called on the website? Under which name do I log on? What is my login name?
  What is my handle? What name do I use online?
code name: How am I called in secret? Under what name do I spy? What is my cover? What is my
  alias?
team name: How is my team called? For which team do I play? What do we call our team? Which squad
  am I in?
secret word: Which word must nobody know? What is the word between us? Which word do I whisper?
  What is the magic word?
project name: What am I working on? How is my project called? What is our project called? What do
  we build?
locker: Where do I keep my things at the gym? Where are my clothes at the pool? Where do I lock up
  my bag?
desk: Where do I sit at the office? Where is my workplace? Where does my computer stand? Which
  table is mine at work?
call sign: How am I called on the radio? What do I say on the radio? Who am I on the air?
street: On which road do I live? What road is my house on? What does the sign at my corner say?
  Which road leads to my home?
favorite number: Which number do I like best? Which number do I love? Which digits do I like most?
lucky number: Which number brings me luck? On what do I bet? Which digits bring me fortune? What
  do I play in the lottery?
employee number: How does the staff office list me? Which digits am I in the firm? How am I listed
  on the payroll?
jersey number: What is on my shirt in the game? What is on my back when I play? Which digits do I
  wear on the field?
order number: How is my purchase listed? Which digits did the shop send me? Under what is my
  purchase filed?
ticket number: What is printed on my ticket? What do I show at the gate? Which digits are on my
  ticket?
account number: Where should the money be sent? What does the bank list me under? Where do I get
  my money paid in?
flat number: In which apartment do I live? Which apartment is mine? Which bell do you ring for me?
ID number: What is on my identity card? How does the state list me? What is in my passport?
access code: How do I get in? What gives me entry? What lets me in?
gate code: How do I open the gate? What do I type at the gate? What do visitors press at the gate?
vault code: How do I open the vault? What opens the vault? What do I turn at the vault?
safe code: How do I open the safe? What opens the safe? How do I get at my jewels?
router code: How do I join the wireless? What do I type for the internet? How do guests get
  online?
printer code: How do I get my pages printed? What do I type at the printer? What starts the
  printer?
server code: How do I get on the server? What does the server ask me for? What unlocks the server?
elevator code: How do I get to the top floor? What do I type in the elevator? What starts the
  lift?
garage code: How do I open the garage? What do I type at the garage? How do I get my car out?
studio code: How do I open the studio? What do I type at the studio? How do I get to the
  recording?
office code: How do I open the office? What do I type at the office? How do I get to work in the
  morning?
device code: How do I unlock my device? What do I type on the tablet? What pairs the device?
"""
)
