"""Models that think before they answer, with a budget: thoughts leave the prompt again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from harness import RunningProxy, llama_server, proxy, server_binary

from bench.overhead import qwen_template
from bench.random_models import SHAPES, ensure
from evoke_proxy.adapters.llama.block_api import BlockApi
from evoke_proxy.core.prompt.rendered import Tokens, common_prefix

BUDGET, TURNS, STEPS = 512, 14, 4
KINDS = ("resident_before", "recovered", "decoded", "omitted")
THOUGHT = 'root ::= [a-z ]{20,30} [a-z] "\\n</think>\\n\\n" '
SAYS = THOUGHT + "[a-z] [a-z ]{10,20} [a-z]"
CALLS = (
    f'{THOUGHT}"<tool_call>\\n<function=read>\\n<parameter=path>\\n'
    'main.py\\n</parameter>\\n</function>\\n</tool_call>"'
)
# A checkpoint stands 4 tokens before the end of a prompt, and a message's first block begins with
# what its template says before it.
AGAIN = 8
_STRIPS = "loop.index0 > ns.last_query_index"
_KEEPS = "(preserve_thinking is defined and preserve_thinking)"


@pytest.fixture(scope="module", params=["tiny-dense-thinks", "tiny-qwen35-thinks"])
def port(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Qwen3.5's chat template, which strips, and does not when told so, as that of Qwen3.6."""
    template = qwen_template().read_text(encoding="utf-8")
    assert _STRIPS in template
    named = tmp_path_factory.mktemp("template") / "thinking.jinja"
    named.write_text(template.replace(_STRIPS, f"({_STRIPS}) or {_KEEPS}"), "utf-8")
    options = ("-np", "1", "--evoke-ram", "32", "--jinja", "--chat-template-file", str(named))
    model = ensure(SHAPES[request.param])
    with llama_server(server_binary(patched=True), *options, model=model) as port:
        yield port


@dataclass(slots=True)
class Thinker:
    """A conversation whose every answer is thought first; sends all of it back every time."""

    running: RunningProxy
    keeps: bool
    talk: ChatClient
    prompts: list[Tokens] = field(default_factory=list)

    def ask(self, grammar: str) -> Mapping[str, Any]:
        """The books of one request, and how many tokens are `new` in it."""
        kwargs = {"preserve_thinking": self.keeps}
        chance = {"temperature": 1, "seed": len(self.prompts)}
        answer = self.talk.post(
            max_tokens=200, grammar=grammar, chat_template_kwargs=kwargs, **chance
        )
        assert answer.status == 200, answer.body
        reply = json.loads(answer.body)
        message = reply["choices"][0]["message"]
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert len(message["reasoning_content"]) > 20
        self.talk.messages.append(
            {key: message[key] for key in ("role", "content", "reasoning_content")}
        )
        new = len(self.prompts[-1])
        if len(self.prompts) > 1:
            new -= common_prefix(*self.prompts[-2:])
        accounting: dict[str, Any] = reply["timings"]["evoke"]
        return {"new": new} | accounting

    def say(self, text: str) -> Mapping[str, Any]:
        self.talk.messages.append({"role": "user", "content": text})
        return self.ask(SAYS)

    def call(self, number: int) -> Mapping[str, Any]:
        """One step: the model's call, made one for the template, and what came of it."""
        accounting = self.ask(CALLS)
        call = {"name": "read", "arguments": '{"path": "main.py"}'}
        named = {"id": f"call{number}", "type": "function", "function": call}
        assert "<function=read>" in self.talk.messages[-1]["content"]
        self.talk.messages[-1] |= {"content": "", "tool_calls": [named]}
        result = f"def f{number}():\n    return {number}\n" * 5
        self.talk.messages.append({"role": "tool", "tool_call_id": named["id"], "content": result})
        return accounting


@pytest.fixture(params=["stripping", "preserving"])
def thinker(
    request: pytest.FixtureRequest, port: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Thinker]:
    """One whose template shows old thoughts or not; the session is the same to the end."""
    with proxy(port, policy__budget=BUDGET) as running:
        keeps = request.param == "preserving"
        thinker = Thinker(running, keeps, ChatClient(running.port))
        render = BlockApi.render

        async def recording_proxy(*given: Any) -> Any:
            rendered = await render(*given)
            thinker.prompts.append(rendered.tokens)
            return rendered

        monkeypatch.setattr(BlockApi, "render", recording_proxy)
        yield thinker
        assert running.metric("evoke_budget_breach_total") == 0
        for stage in ("render", "session", "slot", "decide", "plan", "splice"):
            assert running.metric("evoke_degraded_total", stage=stage) == 0
        for reason in ("held_row", "stale_block", "no_free_cells", "books_differ"):
            assert running.metric("evoke_plan_failures_total", reason=reason) == 0
        (known,) = running.gateway.conversations
        assert known.session.turns == len(thinker.prompts)


def checked(accounting: Mapping[str, Any]) -> Mapping[str, Any]:
    assert accounting["marker"] == "ok"
    assert sum(accounting[kind] for kind in KINDS) == accounting["n_prompt"]
    assert accounting["n_resident_peak"] <= BUDGET
    assert accounting["decoded"] <= accounting["new"] + AGAIN
    return accounting


def test_only_new_text_is_decoded(thinker: Thinker) -> None:
    """What is new: the answer as the template shows it, and the next question."""
    told = [
        checked(thinker.say(f"The code in place{i} is {i}. {FILLER}")) for i in range(TURNS - 3)
    ]
    asked = [checked(thinker.say(f"What is the code in place{i}?")) for i in (0, 3, 1)]
    assert told[-1]["n_prompt"] > 3 * BUDGET
    assert asked[-1]["omitted"] > 2 * BUDGET
    assert sum(accounting["recovered"] for accounting in asked) > 0


def test_thoughts_of_a_turn_are_removed_when_the_next_begins(thinker: Thinker) -> None:
    """An agent's steps show their thoughts until its user says something new."""
    for turn in range(2):
        thinker.talk.messages.append({"role": "user", "content": f"Do number {turn}. {FILLER}"})
        steps = [checked(thinker.call(10 * turn + step)) for step in range(STEPS)]
        checked(thinker.ask(SAYS))
        assert all(accounting["new"] < BUDGET for accounting in steps[1:])
        # More than half of the prompt before, at first: what was done is shown again without.
        shown_again = turn > 0 and not thinker.keeps
        assert (steps[0]["new"] > BUDGET) == shown_again
    assert len(thinker.prompts[-1]) > 2 * BUDGET
