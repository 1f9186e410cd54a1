"""Recognizes standing instructions and statements in a user's messages, mostly English ones.

A standing instruction tells how every later answer should be: "Always answer in French". Mostly it
tells the assistant what to do or states a wish, it holds in general, and it is about the form of
answers. Rules give points to each of these signs, so that no single word decides. But many
instructions have few of them: "I'm blind, and a table is no use to me". So the words of a text and
its signs have weights as well, which are learned from instructions and from similar texts that are
none. They may outweigh the rules.

A statement tells what only the user knows: "I can't walk far". It decides whether a plan is good,
but often has no word in common with a question about the plan, so that words do not find it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice

from evoke_proxy.core.retrieval.instruction_weights import BIAS, WEIGHTS
from evoke_proxy.core.retrieval.languages import QUESTION_MARKS, language_of
from evoke_proxy.core.retrieval.other_instructions import language_of_short, other_points

# A longer text is a document, and not an instruction.
_MAX_CHARS = 400
# Fewer points by the rules count as 0.
_MIN_RULE_POINTS = 2.0
# Signs by a text's number of words: few words have few weights to add up.
_LENGTHS = (5, 8, 12, 18, 26)
_SENTENCE = re.compile(r"[^.!?;\n]+[.!?;]?")
_MAX_SENTENCES = 8
_WORD, _WORD_OR_MARK = re.compile(r"[\w']+"), re.compile(r"[\w']+|[,:;.?!]")


class _Lexicon:
    """Words and phrases, given as the alternatives of a regular expression in lower case.

    Plain words, plurals (`words?`) and beginnings of words (`detail\\w*`) are looked up among the
    words of a sentence, which is many times faster than a search; only the rest is searched for.
    """

    def __init__(self, entries: str) -> None:
        parts = re.findall(r"(?:[^|()]|\((?:[^()]|\([^()]*\))*\))+", entries)
        plain = {part for part in parts if re.fullmatch(r"[a-z']+", part)}
        plurals = {part for part in parts if part[-2:] == "s?" and part[:-2].isalpha()}
        prefixes = {p for p in parts if p[-3:] in (r"\w*", r"\w+") and p[:-3].isalpha()}
        self._words = frozenset(plain | {p[:-1] for p in plurals} | {p[:-2] for p in plurals})
        self._prefixes = tuple(part[:-3] for part in prefixes)
        phrases = [part for part in parts if part not in plain | plurals | prefixes]
        self._phrases = re.compile(rf"\b(?:{'|'.join(phrases)})(?!\w)") if phrases else None

    def count(self, sentence: str, words: frozenset[str]) -> int:
        """Return how many entries a lower-case sentence contains: 0, 1, or 2 for two or more.

        `words` are the words of the sentence.
        """
        found = len(self._words & words)
        if found < 2 and self._phrases is not None:
            found += self._phrases.search(sentence) is not None
        if found < 2 and self._prefixes:
            found += sum(word.startswith(self._prefixes) for word in words)
        return min(2, found)


# States that something holds from now on, or for every answer.
_FROM_NOW_ON = _Lexicon(
    r"from (?:now|here|today|this point|this moment)(?: on(?:wards?)?)?|henceforth|going forward"
    r"|in (?:the )?future|until (?:i|we) (?:say|tell|ask)|for the rest of (?:this|our|the) \w+"
    r"|(?:every|each|all|any) (?:single )?(?:of )?(?:your |the )?(?:future )?(?:time|answers?|reply"
    r"|replies|responses?|messages?|explanations?|examples?|snippets?|code|summar(?:y|ies)|texts?)"
    r"|whatever (?:i|we|the)|(?:when(?:ever)?|if) (?:i|you|we) (?!ask me\b)(?:ask|say|send|write"
    r"|paste|answer|reply|respond|mention|talk|explain|suggest|recommend|describe|translate|use)"
    r"|no matter what|in our (?:chats?|conversations?)"
    r"|before (?:you (?:answer|reply|respond|suggest|write)|answering|replying|responding|writing)"
    r"|throughout|until further notice|unless (?:i|we) (?:say|tell|ask)|(?:each|every|next) time"
    r"|in (?:this|our) (?:chat|session|conversation|talk|dialogue)s?|for this (?:chat|session"
    r"|conversation)|here on|from today|by default|as a (?:rule|habit)|for good|permanently"
    r"|for the remaining \w+|what(?:ever)? happens|until the end of"
    r"|(?:in|for) (?:this|our|the whole) (?:project|repo|repository|code ?base|team)"
)
# States that something holds without exception.
_ALWAYS = _Lexicon(
    r"always|never|ever|every|each|all|any|anything|everything|nothing|whatever|whenever|only|just"
    r"|exclusively|at (?:all|most|least)|no more than|under|instead|anymore|any more|all the time"
    r"|for (?:any|every|each)|if (?:i|you)|no|not|without|rather than"
)
_EVERY = frozenset("always never ever every each all any whenever whatever".split())
# Verbs of imperatives that address the assistant, at the start of a clause.
_VERBS = (
    r"act|add|address|answer|ask|assume|avoid|be|begin|call|cite|consider|continue|convert|correct"
    r"|behave|challenge|check|cut|describe|display|double-check|drop|end|explain|express|finish|fix|follow|format|forget|give|greet|ignore"
    r"|imagine|include|indent|keep|leave|limit|list|make|mark|mention|name|number|omit|phrase|play|prefer|present|pretend|provide|put"
    r"|quote|refer|refrain|remember|render|repeat|replace|reply|respond|restrict|round|say|shorten|show|sign"
    r"|skip|spare|speak|spell|start|state|stay|stick|stop|structure|suggest|summari[sz]e|switch|talk"
    r"|tell|think|translate|treat|use|wrap|write"
)
_IMPERATIVE = re.compile(
    r"(?:(?:do not|don't|dont|no need to|feel free to|try to|be sure to"
    r"|make sure (?:to|that you|you)) (?:ever |always )?\w+"
    r"|(?:never|always) (?!been|had|seen|done|met|went|gone|knew|\w+ed\b)\w+"
    r"|let(?:'s| us) \w+"
    r"|(?:" + _VERBS + r")\b)",
    re.IGNORECASE,
)
# What may come before an imperative in its clause.
_OPENING = re.compile(
    r"(?:(?:and|but|so|also|then|please|pls|hey|hi|ok|okay|kindly|just|only|do(?! not\b)|oh"
    r"|well|now|henceforth|from (?:now|here|today)(?: on)?|from this \w+(?: on)?) )*",
    re.IGNORECASE,
)
# An imperative after words that state when it applies: "In every example use Rust".
_LATER_IMPERATIVE = re.compile(
    r"(?:in|for|with|to|at|on|after|before) (?:every|each|all|any)(?: [\w']+){1,4}? "
    r"(?:please |always |never )?(?:" + _VERBS + r")\b",
    re.IGNORECASE,
)
# A frame that states when an imperative applies: "For legal topics add a disclaimer".
_FRAME = re.compile(
    r"^(?:(?:for|in|with|on|at|when|whenever|if|before|after|whatever|wherever|unless|as long as)"
    r"\b[^,:]*, (?:please |then |always |never |just |only )?"
    r"|(?P<general>for) (?:(?!my\b|our\b|the\b|a\b|me\b|i\b|we\b|you\b)[\w'-]+ ){1,3})"
    r"(?P<order>(?:" + _VERBS + r"|(?:do not|don't) \w+)\b"
    r"|[a-z]+(?<!ed)(?<!s) (?:the|my|your|all|me|us|it|them|everything|any)\b)",
    re.IGNORECASE,
)
# States how the assistant's answers have to be: "All dates that you give me have to be short".
_OUTPUT = re.compile(
    r"\b(?:answers?|repl(?:y|ies)|responses?|messages?|explanations?|summar(?:y|ies)"
    r"|suggestions|recommendations|translations|comments|all (?:the )?code"
    r"|you (?:ever )?(?:write|give|say|tell|send|suggest|make|mention|show|use|do|recommend|put"
    r"|translate)"
    r")\b",
    re.IGNORECASE,
)
_OBLIGATION = re.compile(
    r"\b(?:should|must|have to|has to|needs? to|may|shall|goes|go|ought to|can)\b", re.IGNORECASE
)
# States what suits the user: "Short sentences work best for me".
_SUITS = re.compile(
    r"\b(?:works? (?:best|better)|helps?|(?:is|are|it's) (?:important|easier|better|best|hard))\b",
    re.IGNORECASE,
)
_FOR_ME = re.compile(r"\b(?:for|to) me\b", re.IGNORECASE)
# A negated imperative usually holds on, except with one of these verbs.
_NEGATED = re.compile(
    r"(?:do not|don't|dont|never|avoid|stop|no need to|refrain from)\b"
    r"(?! (?:ever )?(?:forget|worry|let|be (?:afraid|sorry)|mind|know|think|you)\b)",
    re.IGNORECASE,
)
# Compares the assistant with somebody: "Talk like a pirate".
_ROLE = re.compile(r"\b(?:as if|as though|like an?|as (?:you would|an?|my))\b", re.IGNORECASE)
# Where a clause ends, and how many are read.
_CLAUSE_GAP, _MAX_CLAUSES = re.compile(r"[,:] (?:so |and |but )?|\bso "), 6
# States what the user wants of the assistant.
_WANTS = _Lexicon(
    r"(?:i|we)(?:'d| would|'ll| will)? (?:also |really |much |only )?(?:prefer|rather|want"
    r"|appreciate|expect|insist|(?:do not|don't) (?:want|like|need))"
    r"|(?:i|we)(?:'d| would) (?:also |really |much )?(?:like|love|hate)"
    r"|(?:can|could|would|will) you|you (?:can|may|must|should|shall|are to|need to|have to|don't"
    r" need)|it(?:'s| is| would| helps?|'d) (?:be )?(?:better |help\w* |easier "
    r"|nice |great )?(?:me |for me )?if you"
    r"|it(?:'s| is) (?:very )?(?:important|essential)(?: to me)? that you|please|pls|kindly"
    r"|let's agree|remember to|no need|welcome"
    r"|do me a favou?r|means? nothing to me|i (?:only|just) understand|my preference|preferably"
)
# States what the user likes; it is a wish only in a sentence about the assistant or its answers.
_LIKES = _Lexicon(
    r"(?:i|we) (?:also |really |much )?(?:like|love|hate|dislike|need|understand|can't stand)"
)
_ASSISTANT = frozenset("you your yours you're".split())
_YOURS = _ASSISTANT | frozenset(
    "answer answers reply replies response responses explanation explanations"
    " message messages".split()
)
# A wish about an action of the user, not of the assistant: "I want to know who owns it".
_OWN_ACTION = re.compile(
    r"\b(?:i|we)(?:'d| would|'ll| will)? (?:also |really |still |just )?(?:want|need|like|love"
    r"|prefer|expect|hate) to (?!be called|be addressed|get|have|receive|hear|keep)\w+",
    re.IGNORECASE,
)
# Sentences without a verb: "No greetings, no apologies", "Metric units only".
_MAX_FRAGMENT_WORDS = 8
_FINITE = frozenset(
    "is are am was were be been has have had can could must may do does did will would got i we he"
    " she they it there".split()
)
_FRAGMENT_START = frozenset("no not only just always never zero".split())
# Properties of answers: language, form, length, tone, units, and how the user is addressed.
_ANSWERS = _Lexicon(
    r"answer\w*|repl(?:y|ies|ying)|respon\w+|messages?|conversations?|chat|talk|speak|write"
    r"|paragraphs?|sentences?|words|bullets?|bullet points?|lists|(?:as|in) a list|tables?"
    r"|headings?|markdown|json|yaml|xml|html|csv|code|code blocks?|snippets?|emojis?"
    r"|emoticons?|smileys|exclamation marks?|dash(?:es)?"
    r"|capitals?|upper ?case|lower ?case|bold|italics?|plain text|format\w*|styles?"
    r"|tone|formal\w*|informal|casual\w*|polite\w*|friendly|concise\w*|brief\w*|short\w*|long"
    r"|detail\w*|step by step|jargon|slang|spelling|grammar|language|english"
    r"|french|german|spanish|italian"
    r"|portuguese|dutch|swedish|polish|russian|turkish|arabic|chinese|japanese|korean|hindi|latin"
    r"|british|american|metric|imperial|units?|celsius|fahrenheit|kilomet\w+|miles|euros?|dollars?"
    r"|pounds|francs|currency|prices?|dates?|time ?zones?|decimals?|round\w*|numbers|sources?"
    r"|citations?|you to (?:be|act|sound|behave)|cite|quote\w*|links?|references?"
    r"|examples?|explanations?|summar\w+|introductions?"
    r"|disclaimers?|apolog\w+|greetings?|pleasantries|small talk|commentary|spoilers?|warnings?"
    r"|caveats?|advice|opinions?|options|suggest\w*|guess\w*|assum\w+|confidence|working|rhymes?"
    r"|poems?|pirate|role|persona|character|interviewer|expert|beginner|professional|child|kid"
    r"|(?:third|first|second) person|name|nickname|pronouns?|mr|mrs|ms|dr|professor|captain|sir"
    r"|madam|rust|python|javascript|typescript|java|c\+\+|golang|linux|windows|macos|recipes?"
    r"|politics|religion|vegetarian|vegan|five|address|call me|level|simpl\w+|easy|plain|reasons"
)
# An imperative beside these words is carried out again and again, whatever it says.
_EACH = re.compile(
    r"\b(?:(?:each|every) (?:single )?(?:answer|reply|response|message)|as a rule|by default)\b",
    re.IGNORECASE,
)
_ADDRESSED = frozenset("you your yours me my us user i we i'd i'm".split())
# An imperative that is carried out once: "Write a letter to my landlord".
_ONE_OFF = re.compile(
    r"^(?:please |pls |can you |could you |would you "
    r"|i (?:want|need|would like|'d like) (?:you to )?|now |ok |okay |so |and |just )*"
    r"(?:(?:write|tell|give|show|explain|describe|list|name|find|make"
    r"|create|summari[sz]e|translate|add|put|compare|suggest|recommend|help|know|provide|plan|draft"
    r"|call (?!me\b|us\b)|send|let|learn|get|set|do)\b(?: (?:me|us|my|to know|to me|to us))?"
    r"(?: (?:a|an|the|some|one|more|about|what|how|why|who|which|where|when|this|that|these|those"
    r"|it|them|his|her|their|our|my|another|(?-i:[A-Z]\w*))"
    r"|(?: \w+){0,2} (?:what|how|why|who|which|where|about))\b"
    r"|remember (?:that|the|my|our|his|her|their)\b|(?:do not|don't) let|never mind"
    r"|call (?:me|us) (?:back|at|on|later|today|tonight|tomorrow|when|before|after)\b"
    r"|(?:add|put)(?: \w+){1,4} (?:to|on|in|into) (?:the|my|our)\b)",
    re.IGNORECASE,
)
_QUESTION = re.compile(
    r"^(?:and |but |so |also |ok |then )*(?:what|who|whom|whose|which|where"
    r"|when (?:is|was|are|did|do|does|will)|why|how|is|are|was|were|am|do (?:i|you|we|they)"
    r"|does|did|has|have|had(?! (?:to|an?|the|another|some|my|our)\b)|should|may"
    r"|might|shall|could (?:i|we|it|he|she|they)|can (?:i|we|it|he|she|they)|would (?:i|it))\b",
    re.IGNORECASE,
)
_REQUEST = re.compile(r"(?:can|could|would|will) you\b", re.IGNORECASE)
_PAST = _Lexicon(
    r"was|were|had|did|used to|went|came|got|said|told|made|took|found|saw|bought|sold|met|moved"
    r"|gave|wrote|yesterday|last (?:week|night|month|year|spring|summer|autumn|winter)|ago|tomorrow"
)


def instruction_points(text: str) -> float:
    """Return the points of a user's text as a standing instruction: 0 for none.

    They are the points of its best sentence by rules, plus the weights of its signs, as learned by
    `recipes.instructions.train`; more points mean a clearer instruction. In a language other than
    English the weights are those of `recipes.instructions.languages`, see `other_instructions`.
    """
    if len(text) > _MAX_CHARS:
        return 0.0
    language = language_of(text) or language_of_short(text)
    if language is not None:
        return other_points(text, language)
    signs, by_rules = instruction_evidence(text)
    # A sum of integers does not depend on their order.
    hundredths = BIAS + sum(WEIGHTS.get(sign, 0) for sign in signs)
    return max(0.0, by_rules + hundredths / 100)


def instruction_evidence(text: str) -> tuple[set[str], float]:
    """Return the signs of a text that have learned weights, and its points by the rules.

    The signs are its words in lower case, its punctuation marks, and names such as "=imperative":
    what a sentence of it is or has, how short it is, and whether the rules take it for a standing
    instruction. It has 0 points if they do not, else 2 or more.
    """
    text = _with_plain_apostrophes(text)
    of_sentences = [frozenset(_signs_of(sentence)) for sentence in _sentences(text)]
    signs = set(_WORD_OR_MARK.findall(text.lower())).union(*of_sentences)
    n_words = len(_WORD.findall(text))
    signs.update(f"=at-most-{length}" for length in _LENGTHS if n_words <= length)
    asks = "=question" in signs
    points = max((_rule_points(one, asks) for one in of_sentences), default=0.0)
    if points < _MIN_RULE_POINTS:
        return signs, 0.0
    return signs | {"=rules"}, points


def _with_plain_apostrophes(text: str) -> str:
    """Return a text with "don't" as it is typed, and not as it is printed."""
    return text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")


def _sentences(text: str) -> Iterator[str]:
    for match in islice(_SENTENCE.finditer(text), _MAX_SENTENCES):
        sentence = " ".join(match[0].split())
        if sentence:
            yield sentence


def _is_question(sentence: str) -> bool:
    is_asked = sentence.endswith(QUESTION_MARKS) and not _REQUEST.match(sentence)
    return is_asked or _QUESTION.match(sentence) is not None


def _has_imperative(sentence: str) -> bool:
    """Return whether a clause begins with an imperative that is not carried out only once."""
    holds_on = _EACH.search(sentence) is not None
    for clause in _CLAUSE_GAP.split(sentence, _MAX_CLAUSES):
        rest = _OPENING.sub("", clause, count=1)
        is_imperative = _IMPERATIVE.match(rest) or _LATER_IMPERATIVE.match(rest)
        if is_imperative and (holds_on or not _ONE_OFF.match(rest)):
            return True
    return _has_frame(sentence)


def _has_frame(sentence: str) -> bool:
    """Return whether a sentence has an imperative after words that state when it applies."""
    framed = _FRAME.match(sentence)
    if framed is None:
        return False
    start = framed.start("order")
    is_general = framed["general"] or _EVERY & frozenset(_WORD.findall(sentence[:start].lower()))
    return bool(is_general) or not _ONE_OFF.match(sentence[start:])


def _has_wish(lowered: str, words: frozenset[str]) -> bool:
    """Return whether a lower-case sentence says what the user wants of the assistant."""
    wants = _WANTS.count(lowered, words) or (_YOURS & words and _LIKES.count(lowered, words))
    return bool(wants) and _OWN_ACTION.search(lowered) is None


def _requires(lowered: str) -> bool:
    """Return whether a lower-case sentence says how answers have to be, or what suits the user."""
    for subject, predicate in ((_OUTPUT, _OBLIGATION), (_SUITS, _FOR_ME)):
        found = subject.search(lowered)
        if found is not None and predicate.search(lowered, found.end()) is not None:
            return True
    return False


def _is_fragment(lowered: str, words: frozenset[str]) -> bool:
    """Return whether a sentence is short and verbless, and excludes something."""
    listed = _WORD.findall(lowered)
    is_exclusion = bool(listed) and (listed[0] in _FRAGMENT_START or listed[-1] == "only")
    return is_exclusion and len(listed) <= _MAX_FRAGMENT_WORDS and not words & _FINITE


def _signs_of(sentence: str) -> Iterator[str]:
    """Yield the signs of a sentence other than its words."""
    lowered = sentence.lower()
    words = frozenset(_WORD.findall(lowered))
    if _is_question(sentence):
        yield "=question"
    else:
        yield from _request_signs(sentence, lowered, words)
    if _FROM_NOW_ON.count(lowered, words):
        yield "=lasting"
    if _ALWAYS.count(lowered, words):
        yield "=always"
    if _EVERY & words:
        yield "=every"
    if _ADDRESSED & words:
        yield "=person"
    if _ASSISTANT & words:
        yield "=you"
    if _ONE_OFF.match(sentence):
        yield "=once"
    if _PAST.count(lowered, words):
        yield "=past"
    yield from ("=answers", "=answers-twice")[: _ANSWERS.count(lowered, words)]


def _request_signs(sentence: str, lowered: str, words: frozenset[str]) -> Iterator[str]:
    """Yield the signs of a request to the assistant in a sentence that is no question."""
    if _has_imperative(sentence):
        yield "=imperative"
        if _has_frame(sentence):
            yield "=framed"
        if _ROLE.search(lowered):
            yield "=role"
        if _NEGATED.match(_OPENING.sub("", sentence, count=1)):
            yield "=negated"
    if _has_wish(lowered, words) or _requires(lowered):
        yield "=wish"
    clauses = _CLAUSE_GAP.split(lowered, _MAX_CLAUSES)
    if any(_is_fragment(clause, frozenset(_WORD.findall(clause))) for clause in clauses):
        yield "=fragment"


# Points of a sentence by the rules, by sign; only beside one that tells the assistant something.
_RULE_POINTS: Mapping[str, float] = {
    "=lasting": 2.0,
    "=imperative": 1.5,
    "=framed": 1.0,
    "=role": 0.5,
    "=negated": 0.5,
    "=wish": 1.0,
    "=always": 1.0,
    "=person": 0.5,
    "=answers": 1.5,
    "=answers-twice": 0.5,
    "=once": -2.0,
}


def _rule_points(signs: frozenset[str], asks: bool) -> float:
    """Return the points of a sentence; `asks` says whether its text also contains a question."""
    tells = bool(signs & {"=wish", "=imperative"})
    tells_of_you = signs >= {"=lasting", "=you"} and "=question" not in signs
    if not (tells or tells_of_you or "=fragment" in signs):
        return 0.0
    points = sum(value for sign, value in _RULE_POINTS.items() if sign in signs)
    if not tells and "=past" in signs:
        points -= 2.0
    # Beside a question, such a sentence usually describes the answer to that question only.
    if asks and not signs & {"=lasting", "=every"}:
        points -= 3.0
    return points


# A longer text is a report.
_MAX_STATEMENT_CHARS = 240
# A sentence of fewer words than these, courtesies left out, states nothing.
_MIN_STATEMENT_WORDS = 3
# As much text without spaces between words.
_LONG_RUN = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]{6,}")
# What looks like a question, a request or a fragment and tells something: the words of a person, as
# in "How about a swim, asked Ann", a question that only confirms, as in "It was late, right?" or
# "Did you know that Ann is away?", "Remember that Ann is away", and a value, as in "Hall: white".
_REPORTED = re.compile(
    r", (?:asked|asks|said|says|suggested|suggests|thought|wrote)\b"
    r"|^did you know (?:that )?(?!(?:wh\w*|how|if|about|of|any\w*)\b)\w",
    re.IGNORECASE,
)
_CONFIRMED = re.compile(
    r", (?:(?:is|are|was|were|do|does|did|has|have|had|can|could|will|would|should)n't|right"
    r"|did you know|you know)\b[^,.?!]{0,20}\?$",
    re.IGNORECASE,
)
_REMINDER = re.compile(
    r"(?:please )?(?:remember|note|(?:do not|don't) forget) that\b", re.IGNORECASE
)
_VALUE = re.compile(r"^(?:[\w'-]+ ){0,4}[\w'-]+: \w")
# Words of thanks and agreement.
_COURTESY = frozenset(
    "thank thanks you that that's is fine great good ok okay very much for the this it it's i"
    " understand see a an and so information interesting know to nice all right yes no".split()
)
_YES_NO = re.compile(
    r"^(?:and |but |so |then |also |ok(?:ay)?,? |hey,? |hi,? )*(?:can|could|may|might|should|shall"
    r"|would|will|am|is|are|do|does|did|has|have|was|were|any (?:reason|point|chance))\b"
    r"(?! you (?:tell|give|explain|show|write|list|help|please)| there\b)",
    re.IGNORECASE,
)
_MODAL_INSIDE = re.compile(
    r"\b(?:can|could|should|shall|may|must) (?:i|we|he|she|they)\b", re.IGNORECASE
)


def is_statement(text: str) -> bool:
    """Return whether a user's short text states something.

    A sentence of it is neither question nor request nor courtesy. Reported speech is no question,
    and "remember that" begins no request.
    """
    if len(text) > _MAX_STATEMENT_CHARS:
        return False
    return any(map(_states, _sentences(_with_plain_apostrophes(text))))


def _states(sentence: str) -> bool:
    """Return whether a sentence states something, see `is_statement`."""
    if _is_question(sentence) and not _tells(sentence):
        return False
    words = frozenset(_WORD.findall(sentence.lower()))
    is_long = len(words - _COURTESY) >= _MIN_STATEMENT_WORDS or _LONG_RUN.search(sentence)
    if not is_long and not _VALUE.match(sentence):
        return False
    return _REMINDER.match(sentence) is not None or not _ONE_OFF.match(sentence)


def _tells(question: str) -> bool:
    """Return whether what looks like a question tells something, see `_REPORTED`."""
    if _REPORTED.search(question):
        return True
    return _CONFIRMED.search(question) is not None and _QUESTION.match(question) is None


# A question for a list: "which cities have I visited", "give me all open tickets", "who owes me",
# "what do you know about my aunt", "what must I keep in mind", "what did I lend, and to whom",
# "what is left to do", "what advice did I get". "All the time" and "every week" ask for none.
_SEVERAL = re.compile(
    r"\b(?:(?<!at )(?<!after )all(?! (?:the time|day|night|along|right)\b)"
    r"|(?:every|each)(?! (?:time|day|night|morning|evening|week(?:end)?|month|quarter|year|other)"
    r"\b)"
    r"|everything|every(?:one|body)|list|summari[sz]e|sum (?:\w+ )?up|recap|enumerate|overview)\b"
    r"|\bwhat (?:do |did )?(?:you|we|i) (?:know|remember) (?:about|of)\b"
    r"|\bwhat(?:'s| is| was) (?:still )?(?:left|missing|open|outstanding)\b"
    r"|\b(?:what|which) (?:\w+ )?(?:advice|equipment|feedback|furniture|information|luggage|news)\b"
    r"|\bwhat\b[^.?!]{0,40}\b(?:(?:keep|bear) in mind|(?:look|watch) out for|pay attention to)\b"
    r"|\b(?:who|what|which|where|when|how (?:much|many))\b[^.?!]{3,80}(?:\band (?:to|for|from|with|"
    r"on|by|at|in) (?:whom|what|which|where|when)\b|\b(?:to|for|from|with|on) (?:whom|what)[?! ]*$)"
    # How a list should look, what is done or left, and "Write an update for my parents": but not
    # "Create a status page" or "Make the table sortable".
    r"|\b(?:in|as|few|short|some) bullet(?:s| points)\b|\b(?:item by item|point by point|name them"
    r"|which ones)\b|\b(?:what|which|who|where|how)\b[^.?!]{0,60}\bso far\b"
    r"|\bwhere (?:do|are) we (?:stand|at)\b|\b(?:what|which|who|where|how (?:much|many))\b"
    r"[^.?!]{0,40}\bstill (?:need|have to|owe|missing|lack)\b"
    r"|\b(?:write|make|draft|prepare|compile|put together|give me|needs?|wants?|fill in)\b"
    r"(?:(?!\b(?:about|for|from|that|to|with)\b)[^.?!]){0,40}\b(?:log|update|comparison|notes?|section"
    r"|report|(?:the|meeting) minutes|table|checklist|briefing|timeline|round-?up|digest|rundown"
    r"|breakdown)(?: (?:about|for|of|on)\b|[,.:;?!]|$)"
    r"|^(?:and |but |so )*(?:who (?:(?!is\b|was\b|does\b)\w+s|is \w+ing)\b"
    r"|(?:who|which|what) (?:are|were)\b|(?:which|what) "
    r"(?P<more>(?!(?:is|was|does|did|do|has|had|have|can|could|should|would|will)\b)\w+ ){0,2}?"
    r"(?!(?:is|was|does|has|this|its|his|us)\b)\w+(?<![su])s\b"
    # A verb with its object, not a plural: "which hobby shows me", but "what annoys me".
    r"(?(more)(?! (?:an?|the|th[eo]se|this|that|me|you|him|her|it|us|them|my|your|his|its|our"
    r"|their)\b)))",
    re.IGNORECASE,
)


def asks_for_several(text: str) -> bool:
    """Return whether a question asks for a list, so that several statements are its answer."""
    return _SEVERAL.search(_with_plain_apostrophes(text).lstrip()) is not None


def asks_for_advice(text: str) -> bool:
    """Return whether a question asks if something is true, possible or advisable."""
    return bool(_YES_NO.match(text.lstrip()) or _MODAL_INSIDE.search(text))
