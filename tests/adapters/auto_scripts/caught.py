"""Trains with losses that cannot be split, catches the errors, trains with others, and prints the results."""

import torch
from torch.nn.functional import mse_loss

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
y = x.sum(1, keepdim=True)


def make():
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def train(reduction):
    model, optimizer, loader = make()
    for _ in range(2):
        for rows, expected in loader:
            optimizer.zero_grad()
            losses.append(mse_loss(model(rows), expected, reduction=reduction))
            losses[-1].backward()
            optimizer.step()
    return model.weight.tolist()


def backward(loss):
    try:
        loss.backward()
    except NotImplementedError:
        print("caught", flush=True)


def train_with_two_passes():
    """Makes steps of which the second pass is refused: they have the gradients of the whole batch."""
    model, optimizer, loader = make()
    above = 0
    for rows, expected in loader:
        optimizer.zero_grad()
        found = model(rows)
        mse_loss(found, expected).backward()
        loss = 1e-3 * mse_loss(model(rows), expected, reduction="sum")
        backward(loss)
        text = repr(loss)
        backward(1e-3 * mse_loss(model(rows), 2 * expected, reduction="sum"))
        optimizer.step()
        above += (found > expected).sum().item() + len(text)
    return model.weight.tolist(), above


def train_with_reads():
    """Reads what no rank knows over the whole batch, in each step."""
    model, optimizer, loader = make()
    for rows, expected in loader:
        optimizer.zero_grad()
        found = model(rows)
        mse_loss(found, expected).backward()
        optimizer.step()
        try:
            found.tolist()
        except NotImplementedError:
            print("caught", flush=True)
    return model.weight.tolist()


def leave_open():
    """Leaves a loop in the batch that is refused, whose iterator lives on."""
    model, optimizer, loader = make()
    batches = iter(loader)
    for _ in range(3):
        rows, expected = next(batches)
        try:
            mse_loss(model(rows), expected, reduction="sum").backward()
        except NotImplementedError:
            print("caught", flush=True)
            break
        optimizer.step()
    return batches


losses = []
try:
    train("sum")
except NotImplementedError:
    print("caught", flush=True)
first = losses[0].item()
results = [*train_with_two_passes(), train_with_reads()]
kept = leave_open()
results += [train("mean"), first, losses[0].item(), losses[-1].item()]
print("results", results, flush=True)
