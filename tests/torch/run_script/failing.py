"""A training in bfloat16 that fails in its step 30, and ends in the way of its argument."""

import os
import signal
import sys

import torch

way = sys.argv[1]
first = 1 if way == "looks at once" else 30  # bad step
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 41):
    inputs = torch.randn(8, 4)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(inputs)
    distances = torch.sqrt(outputs.float() + (100 if step < first else -100))  # fails
    loss = distances.mean()
    if way.startswith("looks") and not loss.isfinite():
        if way == "looks elsewhere":
            del distances, loss
        elif way == "looks beside it":
            del loss
        raise SystemExit("Loss is nan, stopping training")
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print("trained", flush=True)
if way == "raise":
    loss.backward()
elif way in ("SIGINT", "SIGTERM"):
    os.kill(os.getpid(), signal.Signals[way])
