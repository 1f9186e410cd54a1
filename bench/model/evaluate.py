"""Measures recall by task and length in PyTorch, also with blocks of the KV cache removed.

Decoding is greedy and teacher-forced: an answer is right when every token up to and including the
value is the model's first choice. With --holes the cache is computed from the whole session, then
blocks are removed before the question is read: first all but those of the fact, then those of the
fact, after which the value must not be answered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench import record
from bench.model.chat import Builder, Encoder, Question, Span
from bench.model.checkpoint import load
from bench.model.network import Model
from bench.model.rows import BLOCK, START_ID, encoder
from bench.model.tasks import TASKS, Session, sessions

SEED = 90_210  # the final figures use another one: bench/ruler.py
SINKS, RECENT = 4, 32
Cache = list[tuple[Tensor, Tensor]]
_EXAMPLES = """examples:
  python -m bench.model.evaluate evoke_proxy/models/tiny-recall-f16.gguf
  python -m bench.model.evaluate out/model/run/final.pt --lengths 1000,4000 --sessions 8 --holes
"""


@dataclass(frozen=True, slots=True)
class Spelled:
    """A session in tokens.

    Attributes:
        ids: The tokens of the session and of its questions.
        end: Where the statements end; the questions follow.
        questions: The questions, in order.
        spans_by_key: All spans that state a fact with its present value, by key.
    """

    ids: list[int]
    end: int
    questions: Sequence[Question]
    spans_by_key: Mapping[str, Sequence[Span]]


def spell(session: Session, encode: Encoder) -> Spelled:
    """Return the session's tokens and where its facts stand in them."""
    builder, spans_by_key = Builder(encode), defaultdict[str, list[Span]](list)
    stated = [probe.fact for probe in session.probes if probe.value is not None]
    for message in session.messages:
        said = message["content"]
        found = [(fact, said.find(fact.statement)) for fact in stated]
        spans = [(fact, (at, at + len(fact.statement))) for fact, at in found if at >= 0]
        builder.add(message["role"], said, 0.0, spans)
        for fact, _ in spans:
            spans_by_key[fact.key].append(builder.spans[fact.key])
    end = len(builder.ids)
    for probe in session.probes:
        builder.ask(probe.fact, probe.question)
    return Spelled(builder.ids, end, builder.questions, spans_by_key)


def grade(
    model: Model, chosen: Sequence[Session], encode: Encoder, holes: bool, gap: int = 0
) -> Iterator[tuple[str, bool, str]]:
    """Yield the variant, whether the answer was right, and its text, for every question."""
    tokenizer, _ = encoder()
    for session in chosen:
        spelled = spell(session, encode)
        ids = spelled.ids
        behind = range(spelled.end + gap, len(ids) + gap)
        logits, cache = model.extend(ids, [*range(spelled.end), *behind])
        predicted = logits.argmax(-1).tolist()
        for question, probe in zip(spelled.questions, session.probes, strict=True):
            start, end = question.answer[0], question.value[1]
            right = all(predicted[i - 1] == ids[i] for i in range(start, end))
            said = tokenizer.decode(predicted[start - 1 : end - 1])
            yield "everything", right, f"{probe.answer!r}: {said!r}"
            if holes and question.fact:
                for variant, kept in _with_holes(model, spelled, question, cache):
                    yield variant, kept, ""


def _with_holes(
    model: Model, spelled: Spelled, question: Question, cache: Cache
) -> Iterator[tuple[str, bool]]:
    ids, end = spelled.ids, spelled.end
    starts = [index for index, token in enumerate(ids) if token == START_ID]
    asked = max(start for start in starts if start < question.answer[0] - 3)
    new = ids[asked : question.answer[1] + 1]
    facts, blocks = spelled.spans_by_key[question.asked.key], list(_blocks(starts, end))
    of_fact = [block for block in blocks if any(_touches(block, fact) for fact in facts)]
    own = {place for block in of_fact for place in range(*block)}
    ends = set(range(SINKS)) | set(range(end - RECENT, end))
    for variant, keep in {
        "only the fact's blocks": sorted(own | ends),
        "half of the blocks": sorted(own | ends | _half(blocks)),
        "without the fact's blocks": sorted(set(range(end)) - own),
    }.items():
        logits, _ = model.extend(new, list(range(end, end + len(new))), cache, keep)
        predicted, offset = logits.argmax(-1).tolist(), -asked
        answered = range(question.answer[0] + offset, question.value[1] + offset)
        yield variant, all(predicted[i - 1] == new[i] for i in answered)


def _blocks(starts: Sequence[int], end: int) -> Iterator[Span]:
    before = [start for start in starts if start < end]
    for start, stop in zip(before, [*before[1:], end], strict=True):
        yield from ((at, min(at + BLOCK, stop)) for at in range(start, stop, BLOCK))


def _touches(block: Span, fact: Span) -> bool:
    return block[0] < fact[1] and fact[0] < block[1]


def _half(blocks: Sequence[Span]) -> set[int]:
    return {place for block in blocks[::2] for place in range(*block)}


def main() -> None:
    """Evaluate one model."""
    parser = record.command("model.evaluate", __doc__, _EXAMPLES)
    parser.add_argument("model", type=Path, help="a .pt or .gguf file")
    parser.add_argument("--tasks", default=",".join(TASKS), help="of " + ",".join(TASKS))
    parser.add_argument("--lengths", default="1000,4000", help="tokens (1000,4000)")
    parser.add_argument("--sessions", type=int, default=6, help="sessions a cell (6)")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--holes", action="store_true", help="also with blocks removed")
    parser.add_argument("--gap", type=int, default=0, help="positions left out before the probes")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, (_, encode) = load(args.model), encoder()
    for task in args.tasks.split(","):
        for length in map(int, args.lengths.split(",")):
            chosen = sessions(args.seed, task, length, args.sessions)
            score = defaultdict[str, list[int]](lambda: [0, 0])
            for variant, right, said in grade(model, chosen, encode, args.holes, args.gap):
                score[variant][0] += right
                score[variant][1] += 1
                if not right and variant == "everything":
                    print("  wrong:", said)
            for variant, (count, asked) in score.items():
                print(f"{task:<12}{length:>6}  {variant:<28}{count:>4} of {asked}", flush=True)


if __name__ == "__main__":
    main()
