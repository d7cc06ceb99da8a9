"""Steps of a loop whose losses have a backward pass."""


def take_step(loss, optimizer, scaler=None):
    """Differentiate a loss, and step; by a scaler, if there is one."""
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
