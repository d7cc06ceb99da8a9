"""Train a tiny policy by reinforcement learning, in fp16 or bf16, sampled by another numeric path.

    python examples/torch_rl.py --dtype float16
    python examples/torch_rl.py --dtype bfloat16

The policy reads some digits and should write them in reverse; an answer that is right as a whole is
worth 1, any other 0. Answers are sampled as an inference engine does it: from a copy of the weights
in 16 bits, with the sums of matrix products split in blocks. Training is the plain forward pass
under autocast. In exact arithmetic both paths have the same probabilities; rounding makes them
differ, and each line that is printed says by how much. docs/rl.md explains the columns.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradscaler import FixedScale
from gradscaler.torch import GradScaler

DIGITS = 8
LENGTH = 2  # of a prompt, and of its answer
GROUPS = 16  # prompts in a batch
GROUP_SIZE = 16  # answers to each prompt
WIDTH = 32
HEADS = 4
LAYERS = 2
BLOCKS = 4  # of each sum, when sampling
CLIP = 0.2  # how far the importance ratio may be from 1


class Step(NamedTuple):
    """The measurements of one step; ``difference`` and ``kl`` compare the two numeric paths."""

    reward: float
    difference: float
    kl: float
    zero_groups: float
    scale: float
    skipped: bool


def linear(layer: nn.Linear, inputs: Tensor, blocks: int) -> Tensor:
    """A layer without a bias, whose sums are split: each part is rounded to 16 bits, then added."""
    parts = zip(inputs.chunk(blocks, -1), layer.weight.chunk(blocks, -1), strict=True)
    total, *others = (functional.linear(part, weight) for part, weight in parts)
    for other in others:
        total = total + other
    return total


class Layer(nn.Module):
    """Causal attention, then two linear layers; each adds to its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.merge = nn.Linear(WIDTH, WIDTH, bias=False)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, blocks: int) -> Tensor:
        """Map (answer, position, width) to the same shape."""
        projected = linear(self.project, functional.rms_norm(x, (WIDTH,)), blocks)
        query, key, value = projected.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + linear(self.merge, heads.transpose(1, 2).flatten(2), blocks)
        hidden = functional.gelu(linear(self.widen, functional.rms_norm(x, (WIDTH,)), blocks))
        return x + linear(self.narrow, hidden, blocks)


class Policy(nn.Module):
    """A transformer that gives the logits of the next digit at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.digit = nn.Embedding(DIGITS, WIDTH)
        self.position = nn.Embedding(2 * LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, DIGITS, bias=False)

    def forward(self, tokens: Tensor, blocks: int = 1) -> Tensor:
        """Map tokens (answer, position) to logits (answer, position, digit)."""
        x = self.digit(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, blocks)
        return linear(self.head, functional.rms_norm(x, (WIDTH,)), blocks)


@torch.no_grad()
def sample(policy: nn.Module, prompts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Answers to the prompts, and the logits (answer, position, digit) they were drawn from."""
    engine = copy.deepcopy(policy).to(dtype)
    tokens, logits = prompts, []
    for _ in range(LENGTH):
        logits.append(engine(tokens, BLOCKS)[:, -1])
        drawn = torch.multinomial(logits[-1].float().softmax(-1), 1)
        tokens = torch.cat([tokens, drawn], 1)
    return tokens[:, LENGTH:], torch.stack(logits, 1)


def advantages_of(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Each reward (group, answer) less its group's mean, over its std; which groups are of use.

    A group whose rewards are all equal teaches nothing, and its advantages are exactly 0. The
    rewards are compared with each other, because the mean of equal numbers may be rounded.
    """
    useful = rewards.amax(1) > rewards.amin(1)
    std, mean = torch.std_mean(rewards, 1, keepdim=True)
    return torch.where(useful[:, None], (rewards - mean) / (std + 1e-6), 0.0), useful


def loss_of(logits: Tensor, sampled: Tensor, answers: Tensor, advantages: Tensor) -> Tensor:
    """The clipped policy loss; the importance ratio is of the training to the sampling path."""
    mine, theirs = (
        path.float().log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)
        for path in (logits, sampled)
    )
    ratio = (mine - theirs).exp()
    weight = advantages[:, None]
    return -torch.min(ratio * weight, ratio.clamp(1 - CLIP, 1 + CLIP) * weight).mean()


def mismatch(logits: Tensor, sampled: Tensor, answers: Tensor) -> tuple[float, float]:
    """Mean absolute difference of the answers' log-probabilities; KL of sampling from training.

    Both are per token. The sums are in float64: in float32, rounding is as large as fp16's KL.
    """
    mine, theirs = (path.detach().double().log_softmax(-1) for path in (logits, sampled))
    difference = (mine - theirs).gather(-1, answers[..., None]).abs().mean()
    return float(difference), float((theirs.exp() * (theirs - mine)).sum(-1).mean())


def train(dtype: torch.dtype, steps: int, seed: int) -> Iterator[Step]:
    """Train a new policy; yield what each step measured."""
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    if dtype == torch.float16:
        scaler = GradScaler(growth_interval=10)  # the run is short, so the scale should grow soon
    else:
        scaler = GradScaler(policy=FixedScale(1.0))  # scales nothing, but skips Inf and NaN
    for _ in range(steps):
        prompts = torch.randint(DIGITS, (GROUPS, LENGTH)).repeat_interleave(GROUP_SIZE, 0)
        answers, sampled = sample(policy, prompts, dtype)
        rewards = (answers == prompts.flip(1)).all(1).float().view(GROUPS, GROUP_SIZE)
        advantages, useful = advantages_of(rewards)
        kept = useful.repeat_interleave(GROUP_SIZE)

        with torch.autocast("cpu", dtype):
            logits = policy(torch.cat([prompts, answers], 1))[:, LENGTH - 1 : -1]
        measured = mismatch(logits, sampled, answers)

        scale, applied = scaler.get_scale(), True
        if useful.any():  # zero gradients would count as a finite step, and the scale would grow
            loss = loss_of(logits[kept], sampled[kept], answers[kept], advantages.flatten()[kept])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            applied = scaler.last_step(optimizer).applied
        zero_groups = float((~useful).float().mean())
        yield Step(float(rewards.mean()), *measured, zero_groups, scale, not applied)


def main(argv: list[str] | None = None) -> None:
    """Train, and print the means of some steps, then those of all."""
    parser = argparse.ArgumentParser(description="Reinforcement learning in 16 bits.")
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--steps", type=int, default=150, help="how many (%(default)s)")
    parser.add_argument("--every", type=int, default=25, help="steps in a line (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (%(default)s)")
    arguments = parser.parse_args(argv)
    if min(arguments.steps, arguments.every) < 1:
        parser.error("--steps and --every must be at least 1")

    print("  step  reward  difference       kl  zero groups    scale  skipped")
    done: list[Step] = []
    for step in train(getattr(torch, arguments.dtype), arguments.steps, arguments.seed):
        done.append(step)
        if len(done) % arguments.every == 0:
            print(row(str(len(done)), done[-arguments.every :]))
    print(row("all", done))


def row(name: str, steps: list[Step]) -> str:
    """Means of some steps; the last scale, and how many of these steps were skipped."""
    reward, difference, kl, zero_groups = torch.tensor([step[:4] for step in steps]).mean(0)
    skipped = sum(step.skipped for step in steps)
    return (
        f"{name:>6} {reward:7.3f} {difference:11.2e} {kl:8.1e} {zero_groups:12.1%} "
        f"{steps[-1].scale:8.0f} {skipped:8}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are too small for more
    main()
