"""Sessions of the quality bench about facts that the training did not have."""

from __future__ import annotations

from bench.model.tasks import estimated_tokens
from bench.quality.sessions import UNSEEN, scripts
from evoke_proxy.demo.runner import recalled


def test_a_session_states_every_fact_once_and_asks_for_it_in_both_wordings() -> None:
    for name in UNSEEN:
        questions = set()
        for script in scripts(3, name, 1500, 7):
            text = " ".join(m["content"] for m in script.messages[: -2 * len(script.probes)])
            assert 0.7 * 1500 < estimated_tokens(script.messages) < 1.6 * 1500
            for probe in script.probes:
                assert text.count(probe.fact.statement) == 1
                assert probe.value is not None and recalled(probe.answer, probe.value)
                questions.add(probe.question)
        assert len(questions) >= 30, name
    own, other = (scripts(3, name, 1500, 7) for name in ("new attribute", "new, reworded"))
    assert own[0].probes[0].question != other[0].probes[0].question
