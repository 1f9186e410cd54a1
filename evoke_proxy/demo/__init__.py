"""The demo: one planted fact, one session under four policies, one question at the end."""
