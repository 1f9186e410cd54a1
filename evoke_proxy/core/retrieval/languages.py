"""What the ranking knows of languages other than English.

Word lists and grammar elsewhere in this package are of English. A language here has the words that
structure its questions, how a question refers to an earlier turn, and how users word standing
instructions. A text is in the language with most of its function words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from evoke_proxy.core.retrieval.stemming import stem

QUESTION_MARKS = ("?", "？")  # noqa: RUF001
# The gap between two sentences or lines.
SENTENCE_GAP = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？])|\n+")  # noqa: RUF001
# English words that structure a question and do not name its subject.
FUNCTION_WORDS = frozenset(
    """
    a about after again all also am an and any are as at be been before being but by can could did
    do does doing done for from get give had has have having he her hers him his how i if in into
    is it its just know let like may me might mine must my no not now of off ok on one only or our
    ours out over please say she should show so some tell than thank thanks that the their theirs
    them then there these they thing this those to too under up upon us use very was we were what
    whats when where which while who whom whose why will with would yes you your yours
    """.split()
)
# Of a text so many words, in so many characters, decide about its language.
_MAX_WORDS, _MAX_CHARS = 64, 1024
# A text has at least so many function words of its language.
_MIN_HITS = 2
# A text has this share of characters of a script at least, if it is written in it.
_SCRIPT_SHARE = 0.3
# A question of so few words refers back if nothing in it has a name.
_FEW_WORDS = 2
_WORD = re.compile(r"[^\W\d_]+")
# Words of at least two letters that are no part of code, a path or an option.
_SPOKEN = re.compile(r"(?<![\w./@\\:=$])[^\W\d_]{2,}(?![\w/@\\=(]|\.\w)")
# Letters of Latin scripts that English has in names and borrowed words only.
_ACCENTED = re.compile(r"[\u00c0-\u024f]")
# Words of such a length or less may be codes.
_CODE_CHARS = 2
# Words of other languages that English texts have as well, with another meaning.
_ENGLISH_TOO = FUNCTION_WORDS | frozenset(
    """
    bin bis been car chi come comment con dan data dare den die dies door dos era fait fin fine hat
    hem hen her hun male mal man mee men mes met mine notre nun of on once or pace pain par per pour
    pure real sale sans sea sei sin sole son sono sue sur tan ton tot tout tra van war week will wit
    """.split()
)
_HAN = re.compile(r"[\u3400-\u9fff]")
# Scripts of languages that have no words below.
_OTHER_SCRIPTS = re.compile(
    r"[\u0370-\u03ff\u0400-\u04ff\u0590-\u05ff\u0600-\u06ff\u0900-\u097f\uac00-\ud7af]"
)
# Thai and kana, which have no spaces between words.
_UNSPACED_SCRIPTS = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff]")


@dataclass(frozen=True, slots=True, eq=False)
class Language:
    """What is known of one language.

    Attributes:
        name: Its name in English.
        function_words: Words that structure a question and do not name its subject.
        continues: Matches at the start of a question that goes on with an earlier turn.
        refers: Finds a word that stands for something named before.
        names: Finds what such a word may stand for.
        holds_on: Finds in a message that something holds from then on.
        tells: Finds that a message tells the assistant what to do.
        is_spaced: Whether spaces separate its words.
    """

    name: str
    function_words: frozenset[str]
    continues: re.Pattern[str] | None = None
    refers: re.Pattern[str] | None = None
    names: re.Pattern[str] | None = None
    holds_on: re.Pattern[str] | None = None
    tells: re.Pattern[str] | None = None
    is_spaced: bool = True

    @property
    def function_stems(self) -> frozenset[str]:
        """The stems of the function words."""
        return _stems_of(self)

    def refers_back(self, question: str) -> bool:
        """Return whether a question is understood only with the turns before."""
        sentences = [part.lstrip("¿¡ \t\n") for part in SENTENCE_GAP.split(question)]
        if any(map(self._refers_back, filter(None, sentences))):
            return True
        is_named = self.names is not None and self.names.search(question, 1) is not None
        return self.is_spaced and len(_WORD.findall(question)) <= _FEW_WORDS and not is_named

    def _refers_back(self, sentence: str) -> bool:
        """Return whether a sentence goes on with an earlier one, or refers to what it names."""
        if self.continues is not None and self.continues.match(sentence):
            return True
        found = self.refers.search(sentence) if self.refers is not None else None
        if found is None:
            return False
        # The first word of a sentence has a capital in any case.
        return self.names is None or self.names.search(sentence, 1, found.start()) is None

    def instructs(self, text: str) -> bool:
        """Return whether a text of the user tells how the assistant is to answer from then on."""
        if self.holds_on is None or self.tells is None or text.rstrip().endswith(QUESTION_MARKS):
            return False
        return self.holds_on.search(text) is not None and self.tells.search(text) is not None


@lru_cache(maxsize=16)
def _stems_of(language: Language) -> frozenset[str]:
    return frozenset(map(stem, language.function_words))


def _pattern(text: str, flags: re.RegexFlag = re.IGNORECASE) -> re.Pattern[str]:
    return re.compile("".join(line.strip() for line in text.splitlines()), flags)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_GERMAN = Language(
    "German",
    _words(
        """
        aber alle allem allen aller alles als also am an auch auf aus bei beim bin bis bist da
        dabei dafür damit dann das dass dazu dein deine deinem deinen deiner dem den denn der des
        dessen die dies diese diesem diesen dieser dieses dir doch dort du durch ein eine einem
        einen einer eines er es etwas euch euer für gab gern gerne gewesen gibt habe haben hast hat
        hatte hatten ich ihm ihn ihnen ihr ihre ihrem ihren ihrer im in ins ist ja jede jedem jeden
        jeder jedes jetzt kann kannst können könnte könntest man mein meine meinem meinen meiner
        mich mir mit muss müssen nach nicht noch nochmal nun nur ob oder sag sagen schon sehr sein
        seine seinem seinen seiner seit selbst sich sie sind so soll sollen sollte über um und uns
        unser unsere unserem unseren unserer unter vom von vor war waren was weil welche welchem
        welchen welcher welches wem wen wenn wer werde werden wessen wie wieder will wir wird wo
        woher wohin womit wozu wurde wurden würde zu zum zur zwischen bitte mal eigentlich wann
        """
    ),
    _pattern(r"(?:und|aber|oder|also|dann|auch|was ist mit|wie (?:steht|ist) es mit)\b"),
    # "Sie" and "Ihr" with a capital address the assistant; "gibt es" refers to nothing.
    _pattern(
        r"""\b(?:er|ihn|ihm|ihnen|sein(?:e[mnrs]?)?|sie|ihr(?:e[mnrs]?)?|dessen|deren|denen|
        dies(?:e[mnrs]?)?|jene[mnrs]?|dort|damit|dafür|davon|daran|darauf|derselbe[n]?|dieselbe[n]?|
        dasselbe|(?<!gibt )(?<!Gibt )es)\b""",
        re.NOFLAG,
    ),
    _pattern(r"\b(?!Sie\b|Ihr|Du\b|Dein)[A-ZÄÖÜ]\w+", re.NOFLAG),
    _pattern(
        r"""\b(?:ab (?:jetzt|sofort|heute|nun)|von (?:jetzt|nun|heute) an|künftig|zukünftig|
        in zukunft|fortan|immer|nie|niemals|jedes ?mal|grundsätzlich|stets|weiterhin|
        (?:bei|in|nach) jeder (?:deiner )?(?:antwort|frage|nachricht)|
        in (?:allen|deinen|ihren) antworten|nur noch|nicht mehr|keine? \w+ mehr)\b"""
    ),
    _pattern(
        r"""\b(?:antworte\w*|schreib\w*|nenn\w*|verwend\w*|benutz\w*|nutz\w*|gib|geben sie|sprich|
        sprechen sie|duz\w*|siez\w*|halte?|vermeid\w*|lass\w*|formulier\w*|rechne\w*|erklär\w*|
        beginn\w*|beend\w*|zeig\w*|mach|machen sie|fass\w*|red\w*|sag\w*|bitte|du|dir|deine\w*|
        ich (?:möchte|will|hätte gern\w*))\b"""
    ),
)
_FRENCH = Language(
    "French",
    _words(
        """
        a ai alors as au aucun aussi autre aux avait avec avez avoir avons beaucoup bien c ce cela
        celle celles celui ces cet cette ceux chez combien comme comment dans de depuis des dis
        dit dois doit donc dont du elle elles en encore es est et été être étais était êtes eu eux
        fait faut il ils j je jusqu l la là laquelle le lequel les lesquelles lesquels leur leurs
        lui ma mais me même mes moi mon n ne nos notre nous on ont ou où par parce pas peu peut
        peux plus pour pourquoi pourrais pouvez puis qu quand que quel quelle quelles quels qui quoi
        rappelle sa sans se sera ses si sommes son sont sous suis sur ta te tes toi ton tous
        tout toute toutes très tu un une va vais vers voici voilà vos votre vous y déjà
        """
    ),
    _pattern(r"(?:et|mais|ou|donc|alors|aussi|puis|qu'en est-il|qu’en est-il)\b"),
    # "il y a", "il faut" and "est-il" refer to nothing.
    _pattern(
        r"""\b(?:(?<!est-)(?<!t-)il(?! y a| faut)|elle|ils|elles|lui|leurs?|son|sa|ses|celui|celle|
        ceux|celles|ça|cela|le même|la même|les mêmes|là-bas)\b"""
    ),
    _pattern(
        r"""\b(?:[A-ZÀ-Ý]\w+|(?:le|la|les|mon|ma|mes|un|une|des|du|nos|notre|vos|votre|ce|cette|ces)
        (?! même)\ \w+|l['’]\w+)""",  # noqa: RUF001
        re.NOFLAG,
    ),
    _pattern(
        r"""\b(?:désormais|dorénavant|à (?:partir|compter) (?:de maintenant|d['’]aujourd['’]hui)|
        jusqu['’]à nouvel ordre|à l['’]avenir|plus une? seule?|ne (?:me )?\w+ plus|
        toujours|jamais|chaque fois|systématiquement|dans (?:toutes )?(?:tes|vos) réponses|
        (?:à|dans) chaque (?:réponse|fois|message)|une fois pour toutes|plus (?:de|d['’]))"""  # noqa: RUF001
    ),
    _pattern(
        r"""\b(?:répond\w*|écri\w*|utilis\w*|parl\w*|donne\w*|évit\w*|appell\w*|tutoi\w*|vouvoi\w*|
        fais|faites|mets|mettez|gard\w*|indiqu\w*|termin\w*|commenc\w*|ajout\w*|arrêt\w*|tu|te|tes|
        vous|vos|s['’]il te|merci de|propos\w*|laiss\w*|je (?:veux|voudrais|préfère|souhaite))\b"""  # noqa: RUF001
    ),
)
_SPANISH = Language(
    "Spanish",
    _words(
        """
        a al algo alguien algún alguna ante antes aquel aquella así aún aunque cada como cómo con
        cual cuál cuáles cuando cuándo cuanta cuánta cuántas cuánto cuántos de del desde di dime
        donde dónde dos e el él ella ellas ellos en entonces era eran eres es esa esas ese eso esos
        esta está están estas este esto estos estoy fue fueron ha habido había han has hasta hay
        he hemos la las le les lo los más me mi mis muy nada ni no nos nosotros nuestra nuestro o
        os otra otro para pero por porque pues puede puedes que qué quien quién quiénes se sea según
        ser si sí sido sin sobre son soy su sus también tan te tenía ti tiene tienen tienes todo
        todos tu tú tus un una uno unos usted va vamos y ya yo había recuérdame
        """
    ),
    _pattern(r"(?:y|e|pero|o|entonces|también|además|qué hay de|qué tal|y qué)\b"),
    _pattern(
        r"""\b(?:él|ella|ellos|ellas|sus?|suy[oa]s?|les?|eso|es[ae]|esto|lo mismo|la misma|
        el mismo|allí|ahí)\b"""
    ),
    _pattern(
        r"""\b(?:[A-ZÁÉÍÓÚÑ]\w+|(?:el|la|los|las|mi|mis|un|una|nuestr[oa]s?|tu|al|del)
        (?! mism)\ [^\W\d]\w+)""",
        re.NOFLAG,
    ),
    _pattern(
        r"""\b(?:a partir de (?:ahora|hoy)|de (?:ahora|hoy|aquí) en (?:adelante|más)|
        desde (?:ahora|ya|hoy)|en adelante|en lo sucesivo|siempre|nunca|jamás|cada vez|
        (?:en|con) (?:todas )?(?:tus|sus) respuestas|en cada (?:respuesta|mensaje)|ya no|
        no (?:me )?\w+ más|más nunca|cuando te (?:pida|pregunte))\b"""
    ),
    _pattern(
        r"""\b(?:respond\w*|contest\w*|escrib\w*|us[aeá]\w*|utiliz\w*|habl\w*|d[aá]me|dime|pon\w*|
        evit\w*|tr[aá]t\w*|tute\w*|ll[aá]m\w*|haz\w*|hag\w*|hac\w*|termin\w*|empie\w*|empez\w*|
        agreg\w*|añad\w*|dej[aáe]\w*|pas(?:es|e)|por favor|quiero que|prefiero|necesito que|
        te (?:pido|pediría|pida)|tus|tú|vos)\b"""
    ),
)
_ITALIAN = Language(
    "Italian",
    _words(
        """
        a abbiamo agli ai al alla alle allo anche ancora avevo aveva c che chi ci ciò col come con
        cosa cui da dagli dai dal dalla delle dei degli del della dello di dimmi dov dove e è ed era
        erano essere fa fra gli ha hai hanno ho i il in io l la le lei li lo loro lui ma mi mia mie
        miei mio ne nei nel nella nelle noi non nostra nostro o ogni per perché più può puoi qual
        quale quali quando quanta quante quanti quanto quella quelle quelli quello questa queste
        questi questo se sei si sia siamo sono sta stata stato su sua sue sugli sui sul sulla suo
        suoi ti tra tu tua tuo tutti tutto un una uno va vi voi
        """
    ),
)
_PORTUGUESE = Language(
    "Portuguese",
    _words(
        """
        a ao aos aquela aquele as até com como da das de dela dele deles depois diga do dos e é ela
        elas ele eles em era eram essa esse esta está estão este eu foi foram há isso isto já lhe
        mais mas me mesmo meu meus minha minhas muito na nas não nem no nos nossa nosso num numa o
        onde os ou para pela pelas pelo pelos por porque pra qual quais quando quanta quantas quanto
        quantos que quem são se sem ser seu seus só sua suas também tem têm tinha tu tua um uma você
        vocês
        """
    ),
)
_DUTCH = Language(
    "Dutch",
    _words(
        """
        aan al alles als altijd ben bij daar dan dat de deze die dit doen door een en er ga gaan had
        heb hebben heeft hem het hij hoe hoeveel hun ik in is ja je jij jou jouw kan kun kunnen maar
        me mee meer met mij mijn moet na naar niet nog nu of om omdat onder ons onze ook op over te
        tot uit van veel voor waar waarom wanneer waren was wat we welk welke werd wie wij wil
        worden wordt zal ze zei zelf zich zij zijn zo zou
        """
    ),
)
_CHINESE = Language(
    "Chinese",
    # Pairs of characters: text without spaces has such terms, see `terms_of`.
    _words(
        """
        什么 怎么 哪里 哪儿 哪个 哪些 哪天 哪年 几个 几点 几号 多少 多大 多久 为什 么时 时候 是什
        是谁 是哪 是多 的是 是不 不是 是我 我的 你的 他的 她的 我们 你们 他们 我说 说过 过的 还记
        记得 得我 一下 告诉 诉我 请问 问一 可以 可不 能不 有没 没有 一个 这个 那个 的那 那么 这么
        怎样 样的 了吗 的吗 是吗 在哪 里面 来着 我在 我有 有什 有多
        """
    ),
    _pattern(r"(?:那|那么|还有|另外|然后|以及|她|他|它)"),
    _pattern(r"(?:他|她|它|那里|那儿|那边|这个|那个|这件|那件|这些|那些|呢[？?]?$)"),  # noqa: RUF001
    _pattern(r"(?:我(?:的)?[\u4e00-\u9fff]{1,3}的|叫|[A-Za-z]{2,})"),
    _pattern(
        r"""(?:从现在|从今|往后|以后|今后|接下来|每次|每回|始终|一直|一律|永远|总是|都要|都得|都用|
        不要再|别再|不准|不许|务必|统统|一概|凡是|任何(?:时候|场合|情况)|只要(?:我|提))"""
    ),
    _pattern(r"(?:回答|回复|回我|答|请|你|用|别|不要|写|说|称呼|叫我|给我|跟我|列|加上|省略|换算)"),
    is_spaced=False,
)
# A language without words of its own here.
_OTHER = Language("other", frozenset())
_OTHER_UNSPACED = Language("other without spaces", frozenset(), is_spaced=False)
LANGUAGES: Sequence[Language] = (
    *(_GERMAN, _FRENCH, _SPANISH, _ITALIAN, _PORTUGUESE, _DUTCH),
    _CHINESE,
)


def language_of(text: str) -> Language | None:
    """Return the language of a text; None for English, and for texts with few function words.

    Only the beginning of the text is read.
    """
    return _language_of(text[:_MAX_CHARS])


@lru_cache(maxsize=256)
def _language_of(text: str) -> Language | None:
    n_letters = sum(map(str.isalpha, text)) or 1
    if len(_UNSPACED_SCRIPTS.findall(text)) > _SCRIPT_SHARE * n_letters:
        return _OTHER_UNSPACED
    if len(_OTHER_SCRIPTS.findall(text)) > _SCRIPT_SHARE * n_letters:
        return _OTHER
    if len(_HAN.findall(text)) > _SCRIPT_SHARE * n_letters:
        return _CHINESE
    # A word with a capital is a name, unless it is the first one.
    found = [match[0] for match in islice(_SPOKEN.finditer(text), _MAX_WORDS)]
    words = {*(word.lower() for word in found[:1]), *(word for word in found[1:] if word.islower())}
    hits = [words & one.function_words for one in LANGUAGES]
    # Words that English has as well count beside one that it does not have.
    hits = [of_one if of_one - _ENGLISH_TOO else set() for of_one in hits]
    best = max(hits, key=len)
    # A letter such as é or ß is as good as a word.
    n_hits = len(best) + (bool(best) and _ACCENTED.search(text) is not None)
    if n_hits <= max(_MIN_HITS - 1, len(words & FUNCTION_WORDS)):
        return None
    # "en, es and de" are codes of languages.
    is_clear = any(len(word) > _CODE_CHARS or not word.isascii() for word in best)
    return LANGUAGES[hits.index(best)] if is_clear else None
