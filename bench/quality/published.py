"""Figures that EVOKE has published, for comparison; none was measured here.

Source: the README and results of github.com/Anyesh/EVOKE (Apache-2.0). Other models, other text,
other grading: in process on an RTX 4070 Ti SUPER, the whole document resident before the question,
answers graded by substring and by a judge, budgets of 512, 1024 and 2048 for sessions of about
3,700 (needle) and 6,500 tokens (multi-fact)."""

from __future__ import annotations

SOURCE = "github.com/Anyesh/EVOKE, README and results; Qwen2.5-7B-Instruct Q4_K_M unless said"

# Needle, 25 questions a cell, percent: policy -> at budgets 512, 1024, 2048 (7.2x, 3.6x, 1.8x).
NEEDLE_BUDGETS = (512, 1024, 2048)
NEEDLE = {
    "recency": (20, 20, 40),
    "streaming, discard": (0, 20, 20),
    "h2o": (20, 20, 40),
    "snapkv": (20, 20, 40),
    "infllm (K=8)": (96, 96, 80),
    "evoke": (96, 100, 100),
}
# Five facts a session, 75 questions a cell, percent with Wilson intervals that take them as
# independent: policy -> at budgets 512, 1024, 2048 (12.7x, 6.3x, 3.2x).
MULTIFACT = {
    "recency": ("0", "5.3", "22.7"),
    "streaming": ("0", "0", "13.3"),
    "discard": ("0", "0", "20.0"),
    "h2o": ("0", "1.3", "25.3"),
    "snapkv": ("0", "2.7", "25.3"),
    "infllm (K=8)": ("81.3 [71.1, 88.5]", "58.7 [47.4, 69.1]", "56.0 [44.8, 66.7]"),
    "evoke": ("50.7 [39.6, 61.7]", "57.3 [46.1, 67.9]", "62.7 [51.4, 72.7]"),
    "no_eviction": ("100", "100", "100"),
}
# Needle at budget 1024 by block size, percent (25 questions each).
BLOCK_SIZES = {32: 84, 64: 100, 128: 80, 256: 56, 512: 20}
# Percentage points, needle at budget 512.
ABLATIONS = {
    "retrieval embedder": "+72",
    "recover before decoding the question": "+20 with the embedder, negative without",
    "K of the look-up": "0",
}
