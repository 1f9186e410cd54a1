"""Trains the recall model on generated chats, on the CPU or a GPU, from scratch or a checkpoint.

All schedules count tokens: the phases of longer rows begin at fractions of --tokens, and the
learning rate falls linearly over the last --decay of them, so a run may be stopped and continued. A
number in the file OUT/tokens replaces --tokens while the run goes on. Several ranks share one
gradient over gloo; on a machine with shared cores, ranks of one thread are much faster than OpenMP
threads."""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

from recipes import command
from recipes.model.checkpoint import load, save
from recipes.model.muon import Muon
from recipes.model.network import Model, Shape, is_matrix
from recipes.model.progress import Averages, Log
from recipes.model.rows import PHASES, Batch, start_worker

_EXAMPLES = """examples:
  python -m recipes.model.train --out out/model/run --tokens 60e6 --threads 2
  python -m recipes.model.train --out out/model/more --init MODEL.gguf \\
      --rate 0.008 --adam-rate 0.0011 --decay 0.85 --tokens 15e6
  two ranks on one machine (run both):
  python -m recipes.model.train --out out/model/two --world 2 --rank 0 --threads 1 --tokens 15e6
  python -m recipes.model.train --out out/model/two --world 2 --rank 1 --threads 1 --tokens 15e6
  a GPU, 32 times the rows a step:
  python -m recipes.model.train --out out/model/gpu --device cuda --workers 14 --scale 32
"""
_LOG_S, _SAVE_S = 20.0, 120.0
_TAUGHT_W = 0.06  # tokens of at least this weight are always among those the loss is taken at


class Trainer:
    """One rank: model, optimizers, the workers that make batches, the clock."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        model = load(args.init) if args.init else Model(_shape(args))
        self.model = model.to(self.device)
        named = list(self.model.named_parameters())
        matrices = [p for name, p in named if is_matrix(name, p)]
        others = [p for name, p in named if not is_matrix(name, p)]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            others, lr=args.adam_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )
        self._flatten_gradients([p for _, p in named])
        self.loss = self._loss if args.no_compile else torch.compile(self._loss, dynamic=False)
        self.log = Log(args.out / ("log.jsonl" if args.rank == 0 else f"log{args.rank}.jsonl"))
        self.averages = Averages()
        self.step = self.tokens = self.phase = 0
        self.done = 0.0  # share of the tokens, as rank 0 counts them
        self._phase = multiprocessing.Array("i", [0], lock=False)
        self._batches: Any = multiprocessing.Queue(max(6, 2 * args.workers))
        for index in range(args.workers):
            seed = 1000 + args.seed + 7919 * (args.rank * args.workers + index)
            start_worker(seed, self._batches, self._phase, args.scale, args.thinking)

    def _flatten_gradients(self, parameters: list[Tensor]) -> None:
        """Make all gradients views of one tensor, so that ranks exchange it in one call.

        Two more numbers travel with it: how far rank 0 is and whether the next phase begins.
        """
        total = sum(parameter.numel() for parameter in parameters)
        self.flat, offset = torch.zeros(total + 2, device=self.device), 0
        for parameter in parameters:
            view = self.flat[offset : offset + parameter.numel()]
            parameter.grad = view.view_as(parameter)
            offset += parameter.numel()

    def run(self) -> None:
        """Train until the tokens or the steps are used up, then write final.pt."""
        args, started = self.args, time.monotonic()
        self.log.line(shape=asdict(self.model.shape), args=vars(args))
        logged = saved = started
        tokens_logged, advance = 0, False
        while self.done < 1 and self.step < args.max_steps:
            batch = self._next()
            self.done, advance = self._train(batch, advance)
            now = time.monotonic()
            if now - logged > _LOG_S:
                rate = (self.tokens - tokens_logged) / (now - logged)
                self._report(batch, rate)
                logged, tokens_logged = now, self.tokens
            if args.rank == 0 and now - saved > _SAVE_S:
                self._save("last")
                saved = now
            advance = self._advance(advance)
        if args.rank == 0:
            self._save("final")
        self._report(batch, self.tokens / (time.monotonic() - started))

    def _next(self) -> Batch:
        while True:
            try:
                phase, _, _, batch = self._batches.get(timeout=600)
            except queue.Empty as error:
                raise SystemExit("the workers made no batch in ten minutes") from error
            if phase == self.phase:  # else it was made before the phase changed
                made: Batch = batch
                return made

    def _train(self, batch: Batch, advance: bool) -> tuple[float, bool]:
        chosen, weights, count = self._choose(batch)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss, predicted = self.loss(
                self._put(batch.ids),
                self._put(batch.positions),
                self._put(chosen),
                self._put(batch.targets.ravel()[chosen]),
                self._put(weights),
            )
        loss.backward()
        done, advance = self._exchange(self._share_done(), advance)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._update(done)
        self.tokens += batch.ids.size * self.args.world
        self.averages.add("loss", loss.item())
        targets = batch.targets.ravel()
        right = np.zeros(batch.ids.size, bool)
        picked = chosen[:count]
        right[picked] = predicted.cpu().numpy()[:count] == targets[picked]
        self.averages.grade(batch, right.reshape(batch.ids.shape))
        return done, advance

    def _choose(self, batch: Batch) -> tuple[Any, Any, int]:
        """Return where the loss is taken, its weights, and how many places are not padding."""
        weights = batch.weights.ravel()
        size = int(self.args.share * weights.size)
        chosen = np.nonzero(weights >= _TAUGHT_W)[0]
        if len(chosen) < size:
            rest = np.nonzero((weights < _TAUGHT_W) & (weights > 0))[0]
            more = np.random.permutation(rest)[: size - len(chosen)]
            chosen = np.concatenate([chosen, more])
        elif len(chosen) > size:
            chosen = np.random.permutation(chosen)[:size]
        chosen, count = np.sort(chosen), len(chosen)
        padded = np.concatenate([chosen, np.zeros(size - count, np.int64)])
        taken = weights[padded].copy()
        taken[count:] = 0
        return padded, taken, count

    def _loss(
        self, ids: Tensor, positions: Tensor, chosen: Tensor, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        hidden = self.model.hidden(ids, positions, torch.bfloat16)
        logits = self.model.logits(hidden.reshape(-1, self.model.shape.d)[chosen]).float()
        losses = F.cross_entropy(logits, targets, reduction="none")
        return (losses * weights).sum() / weights.sum(), logits.argmax(-1)

    def _share_done(self) -> float:
        """Return how much of the run is done, by tokens."""
        wanted = self.args.out / "tokens"
        total = float(wanted.read_text()) if wanted.exists() else self.args.tokens
        return self.tokens / total

    def _exchange(self, done: float, advance: bool) -> tuple[float, bool]:
        if self.args.world == 1:
            return done, advance
        first = self.args.rank == 0
        self.flat[-2], self.flat[-1] = done if first else 0, float(advance and first)
        torch.distributed.all_reduce(self.flat)
        done, advance = self.flat[-2].item(), self.flat[-1].item() > 0.5
        self.flat.div_(self.args.world)
        return done, advance

    def _update(self, done: float) -> None:
        args = self.args
        left = (1 - done) / args.decay
        factor = min(1, (self.step + 1) / args.warm_up) * min(1, max(0.02, left))
        self.muon.step(args.rate * factor, args.weight_decay)
        self.adam.param_groups[0]["lr"] = args.adam_rate * factor
        self.adam.step()
        self.flat.zero_()
        self.step += 1

    def _advance(self, advance: bool) -> bool:
        """Begin the next phase if that was agreed; return whether the one after it is due."""
        starts = self.args.phases
        if advance and self.phase < len(starts):
            if self.args.rank == 0:
                self._save(f"phase{self.phase}")
            self.phase += 1
            self._phase[0] = self.phase
            self.log.line(phase=self.phase, done=round(self.done, 4), step=self.step)
            return False
        # Rank 0 decides one step ahead, so that every rank changes at the same step.
        late = self.phase < len(starts) and self.done > starts[self.phase]
        return late and self.args.rank == 0

    def _put(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _report(self, batch: Batch, rate: float) -> None:
        self.log.line(
            done=round(self.done, 4),
            step=self.step,
            million_tokens=round(self.tokens / 1e6, 3),
            length=batch.ids.shape[1],
            tokens_per_s=int(rate),
            **self.averages.rounded(),
        )

    def _save(self, name: str) -> None:
        save(self.args.out / f"{name}.pt", self.model, self.step, self.tokens)


def _shape(args: argparse.Namespace) -> Shape:
    return Shape(
        d=args.width,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_width,
        ff=args.feed_forward,
        convolved=args.convolved,
    )


def _fractions(text: str) -> list[float]:
    starts = [float(part) for part in text.split(",")] if text else []
    if len(starts) >= len(PHASES):
        raise argparse.ArgumentTypeError(f"there are only {len(PHASES)} phases")
    return starts


def layer_numbers(text: str) -> tuple[int, ...]:
    """Return the layers of a comma-separated list."""
    return tuple(int(part) for part in text.split(",") if part)


def _parser() -> argparse.ArgumentParser:
    parser = command("model.train", __doc__, _EXAMPLES)
    parser.add_argument("--out", type=Path, default=Path("out/model/run"))
    parser.add_argument("--init", type=Path, help="a .pt or .gguf file to go on from")
    parser.add_argument("--tokens", type=float, default=60e6, help="of all ranks together (60e6)")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--thinking", type=float, default=0.0, help="share of the answers that begin with a thought"
    )
    model = parser.add_argument_group("model (ignored with --init)")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--width", type=int, default=256)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--kv-heads", type=int, default=2)
    model.add_argument("--head-width", type=int, default=64)
    model.add_argument("--feed-forward", type=int, default=512)
    model.add_argument(
        "--convolved", type=layer_numbers, default=(), help="layers that are short convolutions"
    )
    rates = parser.add_argument_group("optimizers")
    rates.add_argument("--rate", type=float, default=0.02, help="Muon's learning rate")
    rates.add_argument("--adam-rate", type=float, default=3e-3, help="for embedding and norms")
    rates.add_argument("--weight-decay", type=float, default=0.01)
    rates.add_argument("--warm-up", type=int, default=60, help="steps")
    rates.add_argument("--decay", type=float, default=0.25, help="share of the tokens")
    rates.add_argument("--share", type=float, default=0.5, help="of the places taken in the loss")
    rates.add_argument(
        "--phases", type=_fractions, default="0.58,0.84", help="when phase 1 and 2 begin"
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default="cpu")
    machine.add_argument("--threads", type=int, default=2)
    machine.add_argument("--workers", type=int, default=1, help="processes that make batches")
    machine.add_argument("--scale", type=int, default=1, help="times the rows of a batch")
    machine.add_argument("--no-compile", action="store_true")
    machine.add_argument("--world", type=int, default=1)
    machine.add_argument("--rank", type=int, default=0)
    machine.add_argument("--port", type=int, default=29555)
    return parser


def main() -> None:
    """Train one model, or one rank of it."""
    args = _parser().parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if args.world > 1:
        where = f"tcp://127.0.0.1:{args.port}"
        torch.distributed.init_process_group(
            "gloo", init_method=where, rank=args.rank, world_size=args.world
        )
    Trainer(args).run()


if __name__ == "__main__":
    main()
