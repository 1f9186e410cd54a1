"""Compares an exported model with llama-server: tokens, template, logprobs, greedy answers."""

from __future__ import annotations

import random
import string
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.llama import Llama
from bench.model.tasks import TASKS, Session, exchange, session
from evoke_proxy.demo.processes import free_port, server_command, serving
from recipes import command
from recipes.model.chat import Builder, Encoder
from recipes.model.checkpoint import load
from recipes.model.network import Model
from recipes.model.rows import encoder

_EXAMPLES = """examples:
  python -m recipes.model.check_export out/llama-server evoke_proxy/models/tiny-recall-f16.gguf
"""
_FOREIGN = "éàüßñçøλЖ漢字日本語한국어🙂🚀—“”‘’…€½²\u00a0\u200b\tаб"
_AWKWARD = (
    "I'll,DON'T,we've,x=1,  ,\n\n,\r\n,\t,12345,a_b,foo(bar),<|im_start|>,<|im_end|>,"
    "<|endoftext|>,naïve,don't,'S,...,--,#"
).split(",")


def texts(rng: random.Random, count: int) -> Iterator[str]:
    """Yield chats, printable noise, foreign letters and strings that are awkward to cut."""
    letters = string.ascii_letters + "  \n\n..,,''0123456789" + _FOREIGN
    for index in range(count):
        size = rng.randrange(1, 200)
        if index % 4 == 0:
            chat = session(rng, rng.choice(TASKS), rng.randrange(100, 1500))
            yield "\n\n".join(message["content"] for message in chat.messages)
        elif index % 4 == 1:
            yield "".join(rng.choice(string.printable) for _ in range(size))
        elif index % 4 == 2:
            yield "".join(rng.choice(letters) for _ in range(size))
        else:
            yield " ".join(rng.choice(_AWKWARD) for _ in range(size % 60 + 1))


def check_tokens(server: Llama, encode: Encoder, count: int) -> int:
    """Return how many texts the server cuts differently."""
    different = 0
    for said in texts(random.Random(99), count):
        body = {"content": said, "add_special": True, "parse_special": True}
        different += server.call("POST", "/tokenize", body)["tokens"] != encode(said).ids
    return different


@dataclass(slots=True)
class Agreement:
    """How far the server and PyTorch agree."""

    prompts: int = 0
    template_differs: int = 0
    same_answer: int = 0
    entries: int = 0
    largest: float = 0.0  # difference of a logprob above -8

    def compare(self, server: Llama, model: Model, chat: Session, encode: Encoder) -> None:
        """Take in one chat: its first question's tokens and 24 greedy tokens behind it."""
        spelled, probe = Builder(encode), chat.probes[0]
        for message in chat.messages:
            spelled.add(message["role"], message["content"], 0.0)
        spelled.ask(probe.fact, probe.question)
        prompt = spelled.ids[: spelled.questions[0].answer[0]]
        asked: dict[str, Any] = {"messages": [*chat.messages, *exchange(probe.question)]}
        asked["chat_template_kwargs"] = {"enable_thinking": False}
        rendered = server.call("POST", "/apply-template", asked)["prompt"]
        cut = {"content": rendered, "add_special": True, "parse_special": True}
        self.template_differs += server.call("POST", "/tokenize", cut)["tokens"] != prompt
        body = {"prompt": prompt, "n_predict": 24, "temperature": 0, "n_probs": 5}
        body |= {"return_tokens": True, "cache_prompt": False}
        reply = server.call("POST", "/completion", body)
        ids = prompt + reply["tokens"]
        with torch.no_grad():
            hidden = model.hidden(torch.tensor([ids]), torch.arange(len(ids))[None])
            logprobs = torch.log_softmax(model.logits(hidden)[0], -1)[len(prompt) - 1 : -1]
        self.prompts += 1
        self.same_answer += logprobs.argmax(-1).tolist() == reply["tokens"]
        for ours, theirs in zip(logprobs, reply["completion_probabilities"], strict=False):
            for entry in theirs["top_logprobs"][:5]:
                if entry["logprob"] > -8:
                    self.entries += 1
                    off = abs(entry["logprob"] - float(ours[entry["id"]]))
                    self.largest = max(self.largest, off)


def main() -> None:
    """Check one exported model."""
    parser = command("model.check_export", __doc__, _EXAMPLES)
    parser.add_argument("server", type=Path, help="a llama-server binary")
    parser.add_argument("model", type=Path, help="the .gguf file")
    parser.add_argument("--checkpoint", type=Path, help="compare with this .pt (default: the file)")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=3, help="chats a task and length (3)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    port, (_, encode) = free_port(), encoder()
    llama = Llama(port)
    model, rng, agreement = load(args.checkpoint or args.model), random.Random(4242), Agreement()
    llama_command = server_command(args.server, args.model, port, blocks=False)
    with tempfile.TemporaryDirectory() as folder:
        with serving(llama_command, port, Path(folder) / "server.log"):
            print(f"texts {args.texts}, cut differently: {check_tokens(llama, encode, args.texts)}")
            for length in (500, 1000, 2000):
                for task in TASKS:
                    for _ in range(args.prompts):
                        agreement.compare(llama, model, session(rng, task, length), encode)
    print(agreement)


if __name__ == "__main__":
    main()
