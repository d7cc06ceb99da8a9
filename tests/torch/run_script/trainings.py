"""Small trainings of many kinds, each with optimizers of its own; prints a digest of each.

The digest is of weights, optimizer states and random states, so two runs of this script print the
same only if they trained the same, to the bit.
"""

import hashlib
import pickle
import random
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def plain(dtype=torch.float32):
    model = network().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4, dtype=dtype)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, optimizer


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        return self.head(self.block(self.tokens(tokens)))


def gpt_in_bfloat16():
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(4):
        for _ in range(2):
            tokens = torch.randint(16, (2, 6))
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def in_float16_with_a_scaler():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(8, 4) * (1e5 if step == 4 else 1)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return model, optimizer, scaler.state_dict()


def adversarial():
    generator, critic = network(), network()
    critic[0] = nn.Linear(1, 8)
    one = torch.optim.Adam(generator.parameters(), lr=0.01)
    other = torch.optim.Adam(critic.parameters(), lr=0.01)
    for _ in range(4):
        made = generator(torch.randn(8, 4))
        other.zero_grad()
        (critic(made.detach()).mean() - critic(torch.randn(8, 1)).mean()).backward()
        other.step()
        one.zero_grad()
        (-critic(made).mean()).backward()
        one.step()
    return generator, critic, one, other


def by_closures():
    model = network().eval()
    inputs = torch.randn(8, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return model, optimizer


def compiled():
    model = network()
    run = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        run(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def with_workers():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(12, 4))
    for (inputs,) in torch.utils.data.DataLoader(data, 4, shuffle=True, num_workers=1):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return model, optimizer


def checkpointed():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        inputs = torch.randn(8, 4, requires_grad=True)
        checkpoint(model, inputs, use_reentrant=False).square().mean().backward()
        optimizer.step()
    return model, optimizer


def in_several_processes():
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(torch.distributed.get_rank())
    model = network()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        parallel(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    del parallel  # else it is last to hold the group, and its end may wait for a thread for ever
    torch.distributed.destroy_process_group()
    return model, optimizer


def digest(trained):
    states = [each.state_dict() if hasattr(each, "state_dict") else each for each in trained]
    flat, _ = torch.utils._pytree.tree_flatten(states)
    numbers = [(n.dtype, n.float().numpy().tobytes()) if torch.is_tensor(n) else n for n in flat]
    numbers += [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    return hashlib.sha256(pickle.dumps(numbers)).hexdigest()[:16]


TRAININGS = {
    "plain": plain,
    "in bfloat16": lambda: plain(torch.bfloat16),
    **{each.__name__: each for each in (gpt_in_bfloat16, in_float16_with_a_scaler, adversarial)},
    **{each.__name__: each for each in (by_closures, compiled, with_workers, checkpointed)},
}

if __name__ == "__main__":
    chosen = TRAININGS if len(sys.argv) == 1 else {"processes": in_several_processes}
    for name, train in chosen.items():
        torch.manual_seed(0)
        random.seed(0)
        print(f"{name}: {digest(train())}\n", end="", flush=True)  # two ranks may print at once
