"""Sessions with a budget on models that think: removed thoughts cost no decoding of other text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from harness import RunningProxy, llama_server, proxy, server_binary

from bench.random_models import SHAPES, chat_template, ensure
from evoke_proxy.adapters.llama.block_api import BlockApi
from evoke_proxy.core.prompt.rendered import Tokens, common_prefix

BUDGET, TURNS, STEPS = 512, 14, 4
KINDS = ("resident_before", "recovered", "decoded", "omitted")
THOUGHT = 'root ::= [a-z ]{20,30} [a-z] "\\n</think>\\n\\n" '
ANSWER = THOUGHT + "[a-z] [a-z ]{10,20} [a-z]"
TOOL_CALL = (
    f'{THOUGHT}"<tool_call>\\n<function=read>\\n<parameter=path>\\n'
    'main.py\\n</parameter>\\n</function>\\n</tool_call>"'
)
# Tokens that may be decoded besides the new text: a checkpoint is 4 tokens before the end of a
# prompt, and the first block of a message begins with the template's text before it.
BOUNDARY_TOKENS = 8
_STRIPS = "loop.index0 > ns.last_query_index"
_KEEPS = "(preserve_thinking is defined and preserve_thinking)"


@pytest.fixture(scope="module", params=["tiny-dense-thinks", "tiny-qwen35-thinks"])
def port(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a patched server with a template that strips old thoughts, or preserves them.

    It is the template of Qwen3.5, changed to preserve thoughts on request as that of Qwen3.6 does.
    """
    template = chat_template("Qwen3.5-4B").read_text(encoding="utf-8")
    assert _STRIPS in template
    path = tmp_path_factory.mktemp("template") / "thinking.jinja"
    path.write_text(template.replace(_STRIPS, f"({_STRIPS}) or {_KEEPS}"), "utf-8")
    options = ("-np", "1", "--evoke-ram", "32", "--jinja", "--chat-template-file", str(path))
    model = ensure(SHAPES[request.param])
    with llama_server(server_binary(patched=True), *options, model=model) as port:
        yield port


@dataclass(slots=True)
class ThinkingClient:
    """A client whose model thinks before every answer, and which resends all thoughts.

    Attributes:
        preserves: Whether the template keeps old thoughts in the prompt.
        prompts: The tokens of every rendered prompt so far.
    """

    running: RunningProxy
    preserves: bool
    client: ChatClient
    prompts: list[Tokens] = field(default_factory=list)

    def ask(self, grammar: str) -> Mapping[str, Any]:
        """Send a request; returns its token accounting, and its `new` tokens since the last one."""
        kwargs = {"preserve_thinking": self.preserves}
        sampling = {"temperature": 1, "seed": len(self.prompts)}
        answer = self.client.post(
            max_tokens=200, grammar=grammar, chat_template_kwargs=kwargs, **sampling
        )
        assert answer.status == 200, answer.body
        reply = json.loads(answer.body)
        message = reply["choices"][0]["message"]
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert len(message["reasoning_content"]) > 20
        self.client.messages.append(
            {key: message[key] for key in ("role", "content", "reasoning_content")}
        )
        new = len(self.prompts[-1])
        if len(self.prompts) > 1:
            new -= common_prefix(*self.prompts[-2:])
        accounting: dict[str, Any] = reply["timings"]["evoke"]
        return {"new": new} | accounting

    def say(self, text: str) -> Mapping[str, Any]:
        self.client.messages.append({"role": "user", "content": text})
        return self.ask(ANSWER)

    def call(self, number: int) -> Mapping[str, Any]:
        """Run one step: the model's tool call, in the template's form, and its result."""
        accounting = self.ask(TOOL_CALL)
        call = {"name": "read", "arguments": '{"path": "main.py"}'}
        tool_call = {"id": f"call{number}", "type": "function", "function": call}
        assert "<function=read>" in self.client.messages[-1]["content"]
        self.client.messages[-1] |= {"content": "", "tool_calls": [tool_call]}
        result = f"def f{number}():\n    return {number}\n" * 5
        self.client.messages.append(
            {"role": "tool", "tool_call_id": tool_call["id"], "content": result}
        )
        return accounting


@pytest.fixture(params=["stripping", "preserving"])
def thinker(
    request: pytest.FixtureRequest, port: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ThinkingClient]:
    """A client whose template strips or preserves old thoughts; all its turns are one session."""
    with proxy(port, policy__budget=BUDGET) as running:
        preserves = request.param == "preserving"
        thinker = ThinkingClient(running, preserves, ChatClient(running.port))
        render = BlockApi.render

        async def recording_render(*args: Any) -> Any:
            rendered = await render(*args)
            thinker.prompts.append(rendered.tokens)
            return rendered

        monkeypatch.setattr(BlockApi, "render", recording_render)
        yield thinker
        assert running.metric("evoke_budget_breach_total") == 0
        for stage in ("render", "session", "slot", "decide", "plan", "splice"):
            assert running.metric("evoke_degraded_total", stage=stage) == 0
        for reason in ("held_row", "stale_block", "no_free_cells", "books_differ"):
            assert running.metric("evoke_plan_failures_total", reason=reason) == 0
        (conversation,) = running.gateway.conversations
        assert conversation.session.turns == len(thinker.prompts)


def checked(accounting: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the token accounting of a turn, and return it."""
    assert accounting["marker"] == "ok"
    assert sum(accounting[kind] for kind in KINDS) == accounting["n_prompt"]
    assert accounting["n_resident_peak"] <= BUDGET
    assert accounting["decoded"] <= accounting["new"] + BOUNDARY_TOKENS
    return accounting


def test_only_new_text_is_decoded(thinker: ThinkingClient) -> None:
    """New is the last answer, as the template renders it, and the next question."""
    facts = [
        checked(thinker.say(f"The code in place{i} is {i}. {FILLER}")) for i in range(TURNS - 3)
    ]
    questions = [checked(thinker.say(f"What is the code in place{i}?")) for i in (0, 3, 1)]
    assert facts[-1]["n_prompt"] > 3 * BUDGET
    assert questions[-1]["omitted"] > 2 * BUDGET
    assert sum(accounting["recovered"] for accounting in questions) > 0


def test_thoughts_of_a_turn_are_removed_when_the_next_begins(thinker: ThinkingClient) -> None:
    """The template renders the thoughts of an agent's steps until the next user message."""
    for turn in range(2):
        thinker.client.messages.append({"role": "user", "content": f"Do number {turn}. {FILLER}"})
        steps = [checked(thinker.call(10 * turn + step)) for step in range(STEPS)]
        checked(thinker.ask(ANSWER))
        assert all(accounting["new"] < BUDGET for accounting in steps[1:])
        # The steps of the turn before are then rendered without thoughts, which are new tokens.
        is_rerendered = turn > 0 and not thinker.preserves
        assert (steps[0]["new"] > BUDGET) == is_rerendered
    assert len(thinker.prompts[-1]) > 2 * BUDGET
