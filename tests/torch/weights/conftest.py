"""Two models, and their training with parameters of 16 bits or of 32."""

from types import SimpleNamespace

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from gradscaler.torch import GradScaler, MasterWeights, weights


class GPT(nn.Module):
    """Two layers without norms, which autocast would compute in float32 anyway."""

    def __init__(self, symbols=11, width=16, length=8):
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        blocks = [
            nn.ModuleDict(
                {
                    "query_key_value": nn.Linear(width, 3 * width),
                    "mix": nn.Linear(width, width),
                    "up": nn.Linear(width, 2 * width),
                    "down": nn.Linear(2 * width, width),
                }
            )
            for _ in range(2)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, symbols, bias=False)

    def forward(self, symbols):
        dtype = torch.get_autocast_dtype("cpu")  # to which it casts neither of these
        x = nn.functional.embedding(symbols, self.symbols.weight.to(dtype))
        x = x + self.places.to(dtype)
        for block in self.blocks:
            query, key, value = block["query_key_value"](x).chunk(3, -1)
            attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + block["mix"](attended)
            x = x + block["down"](block["up"](x).relu())
        return self.head(x)


def mlp_batches(count):
    images, labels = load_digits(return_X_y=True)
    chosen = torch.randint(len(labels), (count, 32), generator=torch.Generator().manual_seed(1))
    pairs = torch.tensor(images / 16).float(), torch.tensor(labels)
    return [tuple(each[rows] for each in pairs) for rows in chosen]


def gpt_batches(count):
    """Sequences in which each symbol follows from the one before."""
    starts = torch.randint(11, (count, 16, 1), generator=torch.Generator().manual_seed(1))
    sequences = (starts + 3 * torch.arange(9)) % 11
    return [(each[:, :-1], each[:, 1:]) for each in sequences]


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(64, 48), nn.Sigmoid(), nn.Linear(48, 10)),
    "gpt": GPT,
}
BATCHES = {"mlp": mlp_batches, "gpt": gpt_batches}


def make(name="mlp"):
    torch.manual_seed(0)
    return MODELS[name]()


def train(
    optimizer,
    model,
    scaler,
    name="mlp",
    steps=30,
    clip=None,
    micro_batches=1,
    dtype=torch.float16,
    overflow=(),
    begin=0,
):
    """The loss of each step; in those of ``overflow``, a gradient becomes Inf."""
    losses = []
    batches = BATCHES[name]((begin + steps) * micro_batches)
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        total = 0.0
        for inputs, targets in batches[step * micro_batches : (step + 1) * micro_batches]:
            with torch.autocast("cpu", dtype=dtype):
                outputs = model(inputs).float().flatten(0, -2)
                loss = nn.functional.cross_entropy(outputs, targets.flatten()) / micro_batches
            scaler.scale(loss).backward()
            total += loss.item()
        if step in overflow:
            next(model.parameters()).grad[0] = torch.inf
        if clip is not None:
            clip(scaler, optimizer, model)
        scaler.step(optimizer)
        scaler.update()
        losses.append(total)
    return losses


def values(model, optimizer):
    """The float32 values of all parameters."""
    if isinstance(optimizer, MasterWeights):
        return [optimizer.wide(parameter) for parameter in model.parameters()]
    return [parameter.detach().clone() for parameter in model.parameters()]


def trained(
    wrapped,
    name="mlp",
    make_scaler=GradScaler,
    options=None,
    lr=1e-2,
    optimizer_class=torch.optim.AdamW,
    **training,
):
    """Train with MasterWeights if ``wrapped`` is a dict of its arguments, else without it."""
    model = make(name)
    options = {"lr": lr, **(options or {})}
    if wrapped is None:
        optimizer = optimizer_class(model.parameters(), **options)
    else:
        optimizer = MasterWeights(optimizer_class, model, **wrapped, **options)
    scaler = make_scaler(init_scale=2.0**16, growth_interval=4)
    losses = train(optimizer, model, scaler, name, **training)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        losses=losses,
        values=values(model, optimizer),
    )


@pytest.fixture(scope="session", name="trainings")
def _trainings():
    return SimpleNamespace(make=make, train=train, trained=trained, values=values)


@pytest.fixture
def no_grad_dtype(monkeypatch):
    """A PyTorch in which a gradient must have its parameter's dtype."""
    monkeypatch.setattr(weights, "_HAS_GRAD_DTYPE", False)
