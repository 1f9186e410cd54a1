"""Texts for comparing embedders: short, long, empty, foreign, code, control characters."""

from __future__ import annotations

_PROSE = (
    "The lighthouse keeper wrote down the weather every evening, and every morning he compared it"
    " with what the sea had done. "
)
_CODE = "def total(rows: list[int]) -> int:\n    return sum(row for row in rows if row > 0)\n"
_LOG = "2026-03-04T05:06:07Z ERROR worker-17 pool exhausted: 64/64 connections, waited 30.0 s\n"
# Longer than the 256 tokens that all-MiniLM-L6-v2 reads.
LONG = (_PROSE * 30, _CODE * 40, _LOG * 50, "word " * 255, "word " * 254, "word " * 253, "x" * 5000)

TEXTS: tuple[str, ...] = (
    "", " ", "\n\t\n", ".", "a", "I", "7", "?!", "the", "\u0000\u0001 control \u0007 characters",
    "How do I restart the ingest service?",
    "The automobile is painted red.",
    "What colour is the car?",
    "My flight to Lisbon leaves at seven in the evening.",
    "When does the plane to Portugal depart?",
    "The password of the staging database is kestrel-4471.",
    "9f1c2e34-8a77-4b0e-9d21-6f0b5a3c7e11",
    "SELECT name, count(*) FROM orders WHERE total > 100 GROUP BY name HAVING count(*) > 3;",
    '{"tool": "read_file", "arguments": {"path": "src/config.py", "limit": 40}}',
    "https://example.org/a/b?c=d&e=%20f#g",
    "C:\\Users\\someone\\AppData\\Local\\Temp\\~tmp.txt",
    "\u00c9t\u00e9, na\u00efve fa\u00e7ade, \u00fcber Stra\u00dfe, \u0141\u00f3d\u017a",
    "Das Fahrrad steht hinter der Garage und hat einen Platten.",
    "La r\u00e9union est report\u00e9e \u00e0 jeudi prochain, dix heures.",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043a\u0430\u043a \u0434\u0435\u043b\u0430?",
    "\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb\u516c\u56ed\u3002",
    "\u6771\u4eac\u306f\u4eca\u65e5\u96e8\u3067\u3059\u3002",
    "\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4.",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "emoji \U0001f600\U0001f680\U0001f468\u200d\U0001f469\u200d\U0001f467 and \u2603\ufe0f",
    "e\u0301 combining against \u00e9 composed; \ufb01 ligature; \u2167 roman; \u00bd half",
    "zero\u200bwidth\u200bspaces and\u00a0hard\u2007ones",
    "MIXED case AND ACRONYMS LIKE HTTP/2, TLS 1.3 and K/V",
    "3.14159 -2.5e-10 0x7fff 1,000,000 50% \u20ac12.50 #42",
    "unsplittableunknownpseudowordwithoutanymeaningwhatsoeverinthevocabulary",
    "x = 1; y = 2; print(x + y)  # three",
    "if (p != NULL && p->next != NULL) { free(p->next); p->next = NULL; }",
    "- milk\n- eggs\n- bread\n\n1. first\n2. second\n",
    "| name | age |\n|---|---|\n| Ada | 36 |\n| Alan | 41 |\n",
    "[CLS] special [SEP] words [MASK] in [PAD] plain text [UNK]",
    "<|im_start|>system\nYou are terse.<|im_end|>",
    "Not only does the committee reject the proposal, it also asks for the data behind it.",
    "The committee accepts the proposal and does not want to see any data.",
    _PROSE, _CODE, _LOG, _PROSE * 3, _CODE * 4,
    *LONG,
)  # fmt: skip
