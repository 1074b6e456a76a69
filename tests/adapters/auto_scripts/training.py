"""Loops of one process, by name, as people write them. The script knows nothing of sirtaki."""

import json
import math
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

name, path = sys.argv[1:]
torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
inputs = torch.randn(101, 10)
targets = (inputs @ torch.randn(10, 4)).argmax(1)
data = TensorDataset(inputs, targets)
loader = DataLoader(data, batch_size=25, shuffle=True)  # the last batch has one row
held_out = DataLoader(TensorDataset(inputs[:40], targets[:40]), batch_size=16)
model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))
critic = nn.Linear(10, 1)
criterion = nn.CrossEntropyLoss()
seen = []  # numbers that the script reads


class Meter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n
        self.average = self.sum / self.count


def evaluate():
    model.eval()
    total = right = 0
    with torch.no_grad():
        for x, y in held_out:
            out = model(x)
            total += criterion(out, y).item() * x.size(0)
            right += (out.argmax(1) == y).sum().item()
    model.train()
    seen.extend([total / len(held_out.dataset), right])


def step(optimizer, x, y):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def epochs(optimizer):
    for _ in range(3):
        total = 0.0
        for x, y in loader:
            total += step(optimizer, x, y).item() * len(x)
        seen.append(total / len(loader.dataset))
        evaluate()


def sgd():
    epochs(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def adam():
    epochs(torch.optim.Adam(model.parameters(), lr=0.01))


def plateau():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
    for _ in range(6):
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        scheduler.step(mean)
        seen.extend([float(mean), optimizer.param_groups[0]["lr"]])


def closure():
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4)
    for _ in range(2):
        for x, y in loader:

            def compute(x=x, y=y):
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                return loss

            seen.append(optimizer.step(compute).item())


def several_optimizers():
    generating = torch.optim.Adam(model.parameters(), 1e-2)
    judging = torch.optim.RMSprop(critic.parameters(), 1e-2)
    lift = torch.randn(4, 10)
    for _ in range(3):
        for x, _ in loader:
            judging.zero_grad()
            real = functional.softplus(-critic(x)).mean()
            real.backward()
            fake = model(x) @ lift
            mistaken = functional.softplus(critic(fake.detach())).mean()
            mistaken.backward()
            judging.step()
            generating.zero_grad()
            loss = functional.softplus(-critic(fake)).mean()
            loss = loss + 1e-3 * sum((one**2).sum() for one in model.parameters())
            loss.backward()
            generating.step()
            seen.extend([(real + mistaken).item(), loss.item(), critic(x).mean().item()])


def early_break():
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(8):
        for x, y in loader:
            loss = step(optimizer, x, y)
            if loss < 1.1:
                break
        seen.append(loss.item())
        evaluate()


def skipped_nan():
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs[7] = float("nan")
    for _ in range(3):
        skipped = 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            if torch.isnan(loss):
                skipped += 1
                continue
            loss.backward()
            optimizer.step()
            assert math.isfinite(loss.item())
        seen.extend([skipped, loss.item()])


def accumulated():
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = 0
    for _ in range(4):
        optimizer.zero_grad()
        for number, (x, y) in enumerate(loader):
            loss = criterion(model(x), y) / 2
            loss.backward()
            rows += x.shape[0]
            if number % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
            if number % 3 == 2:
                seen.append(float(f"{loss:.12f}"))
        seen.append(rows)


def counts():
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(3):
        losses, best, right, hits = Meter(), Meter(), 0, torch.zeros((), dtype=torch.int64)
        for x, y in loader:
            out = model(x)
            loss = criterion(out, y)
            losses.update(loss.item(), x.size(0))
            seen.extend([x.ndim, y.dim(), x.nbytes, x.element_size() * x.numel()])
            top = out.topk(2, 1)[1].t().eq(y.view(1, -1).expand(2, x.size(0)))
            best.update(top.reshape(-1).float().sum(0).mul_(100.0 / x.size(0)), x.size(0))
            right += (out.argmax(1) == y).sum().item()
            hits += torch.sum(out.argmax(1) == y.data)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seen.extend([losses.average, float(best.average), losses.count * 1.0, right, hits.item()])


def accuracy(out, y, topk):
    found = out.topk(max(topk), 1)[1].t()
    correct = found.eq(y.view(1, -1).expand_as(found))
    return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / y.size(0)) for k in topk]


def class_counts():
    """Small tensors without rows: some are read in the loop, some after it."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        confusion, pairs = torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4)
        losses, votes = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
        for number, (x, y) in enumerate(loader):
            out = model(x)
            loss = criterion(out, y)
            with torch.no_grad():
                found = out.argmax(1)
                confusion += torch.bincount(4 * y + found, minlength=16).reshape(4, 4)
                pairs.index_put_((y, found), torch.ones(len(y)), accumulate=True)
                each = functional.cross_entropy(out, y, reduction="none")
                losses.index_add_(0, y, each).index_add_(0, found, each)
                votes.scatter_add_(0, found, torch.ones_like(found))
                first, second = accuracy(out, y, (1, 2))
                if number % 2:
                    seen.extend([first[0].item(), float(second), *out.softmax(1).mean(0).tolist()])
                    seen.extend([*functional.one_hot(y, 4).sum(0).tolist(), votes[0].item()])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seen.extend([*confusion.view(-1).tolist(), *pairs.view(-1).tolist()])
        seen.extend([*losses.tolist(), *votes.tolist()])


def ignored_equally():
    """Each row has one target that is left out, and a regularisation that grows."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            pairs = torch.stack([y, torch.full_like(y, -100)], 1)
            out = model(x).unsqueeze(2).expand(-1, -1, 2)
            loss = functional.cross_entropy(out, pairs, label_smoothing=0.1 + 0.1 * epoch)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())


def iterator():
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = iter(loader)
    for number in range(12):
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        loss = step(optimizer, x, y)
        if number % 5 == 4:
            seen.append(loss.item())
            evaluate()


globals()[name]()
parameters = [one.tolist() for one in [*model.parameters(), *critic.parameters()]]
with open(path, "w") as file:
    json.dump({"seen": seen, "parameters": parameters}, file)
