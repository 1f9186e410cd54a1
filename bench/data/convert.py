"""Makes bfcl_memory.json, mtrag_un.json and mtrag_dialogs.json from the published files; see
README.md here.

The first two become conversations of user messages, and questions with the indexes of the messages
that hold what answers them. A question whose source text is in no message is left out. The third
has the dialogs themselves, for `bench.tasks`.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCENARIOS = ("customer", "finance", "healthcare", "student")
COLLECTIONS = ("clapnq", "fiqa", "govt", "ibmcloud")
# Of each collection of MTRAG-UN: most and fewest questions of a conversation, most passages of a
# question, most turns before it.
MOST_QUESTIONS, FEWEST_QUESTIONS, MOST_PASSAGES, MOST_BEFORE = 20, 13, 3, 4
# Of the dialogs of MTRAG-UN: two disjoint sets, each of so many characters; no longer answers.
SPLITS, MOST_CHARACTERS, LONGEST_ANSWER = ("tuning", "reporting"), 300_000, 1200
Json = dict[str, Any]


def lines_of(path: Path) -> list[Json]:
    """The objects of a file with one JSON object a line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def plain(text: str) -> str:
    """Letters and digits in lower case, to find a quotation."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def bfcl(folder: Path) -> list[Json]:
    """One conversation a scenario of `bfcl_eval/data`."""
    answers = {
        each["id"]: each for each in lines_of(folder / "possible_answer/BFCL_v4_memory.json")
    }
    asked = lines_of(folder / "BFCL_v4_memory.json")
    made = []
    for scenario in SCENARIOS:
        rows = lines_of(folder / f"memory_prereq_conversation/memory_{scenario}.json")
        said = [turn["content"] for row in rows for turns in row["question"] for turn in turns]
        found = [plain(text) for text in said]
        questions = []
        for each in asked:
            if each["scenario"] != scenario:
                continue
            parts = re.split(r"\.\.\.|…", answers[each["id"]]["source"])
            quoted = [plain(part) for part in parts if len(plain(part)) > 8]
            at = [next((i for i, text in enumerate(found) if q in text), -1) for q in quoted]
            if quoted and -1 not in at:
                text = each["question"][0][0]["content"]
                questions.append({"id": each["id"], "text": text, "evidence": sorted(set(at))})
        made.append({"id": f"bfcl-{scenario}", "messages": said, "questions": questions})
    return made


def mtrag(file: Path) -> list[Json]:
    """Conversations of 20 questions each of every collection; the first of each is `mtrag-NAME`.

    A conversation is the passages of its questions, in their order. No dialog of the source is in
    two conversations.
    """
    made = []
    rows = lines_of(file)
    for collection in COLLECTIONS:
        fitting = [row for row in rows if row["Collection"] == collection and _is_used(row)]
        for number, at in enumerate(range(0, len(fitting), MOST_QUESTIONS), 1):
            chosen = fitting[at : at + MOST_QUESTIONS]
            if len(chosen) >= FEWEST_QUESTIONS:
                name = f"mtrag-{collection}" if number == 1 else f"mtrag-{collection}-{number}"
                made.append({"id": name, **_conversation(chosen)})
    return made


def _is_used(row: Json) -> bool:
    few_passages = 1 <= len(row["contexts"]) <= MOST_PASSAGES
    return few_passages and row["answerability"] == ["ANSWERABLE"]


def _conversation(rows: list[Json]) -> Json:
    passages: dict[str, int] = {}
    texts: list[str] = []
    questions: list[Json] = []
    for row in rows:
        for context in row["contexts"]:
            if context["document_id"] not in passages:
                passages[context["document_id"]] = len(texts)
                texts.append(context["text"].strip())
        *before, last = row["input"]
        questions.append(
            {
                "id": row["task_id"],
                "type": sorted(row["Question Type"]),
                "before": [[t["speaker"], t["text"]] for t in before[-MOST_BEFORE:]],
                "text": last["text"],
                "evidence": sorted({passages[c["document_id"]] for c in row["contexts"]}),
            }
        )
    return {"messages": texts, "questions": questions}


def dialogs(file: Path) -> Json:
    """Return for each split a list of dialogs, each a list of [user's text, agent's text]."""
    longest_first = sorted(lines_of(file), key=lambda row: (-len(row["input"]), row["task_id"]))
    answers: set[str] = set()
    made: dict[str, list[Json]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    for number, row in enumerate(longest_first):
        split = SPLITS[number % len(SPLITS)]
        pairs: Any = []
        for asked, said in zip(row["input"], row["input"][1:], strict=False):
            question, answer = asked["text"].strip(), said["text"].strip()
            if (asked["speaker"], said["speaker"]) != ("user", "agent") or answer in answers:
                continue
            answers.add(answer)
            if len(answer) <= LONGEST_ANSWER:
                pairs.append([question, answer])
        size = sum(len(text) for pair in pairs for text in pair)
        if pairs and sizes[split] + size <= MOST_CHARACTERS:
            made[split].append(pairs)
            sizes[split] += size
    return made


def main() -> None:
    """Write all three."""
    parser = argparse.ArgumentParser("python bench/data/convert.py", description=__doc__)
    parser.add_argument("bfcl", type=Path, help="bfcl_eval/data of ShishirPatil/gorilla")
    parser.add_argument("mtrag", type=Path, help="reference.jsonl of IBM/mt-rag-benchmark")
    arguments = parser.parse_args()
    for name, made in (("bfcl_memory", bfcl(arguments.bfcl)), ("mtrag_un", mtrag(arguments.mtrag))):
        path = HERE / f"{name}.json"
        path.write_text(json.dumps(made, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
        for each in made:
            n_tokens = sum(map(len, each["messages"])) // 4
            print(each["id"], len(each["messages"]), "messages", len(each["questions"]), n_tokens)
    path = HERE / "mtrag_dialogs.json"
    text = json.dumps(dialogs(arguments.mtrag), ensure_ascii=False, indent=0)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
