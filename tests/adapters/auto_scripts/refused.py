"""Loops that cannot be split over ranks as they are, by name."""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

name = sys.argv[1]
torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
inputs = torch.randn(150, 6, 10)
targets = (inputs.mean(1) @ torch.randn(10, 4)).argmax(1)
if name.startswith("ignored"):
    targets[128:140] = -100  # in the last batch only, and more on one rank than on the other
layers = {
    "batch_norm": lambda: nn.BatchNorm1d(16),
    "running_statistics": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten()
    ),
    "dropout": lambda: nn.Dropout(0.3),
}
model = nn.Sequential(nn.Linear(10, 16), layers.get(name, nn.Tanh)(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def sequence_first(rows):
    return torch.stack([x for x, _ in rows], 1), torch.stack([y for _, y in rows]).expand(6, -1)


def joined(rows):
    """Joins the steps of all rows, as text of several lengths is joined."""
    return torch.cat([x for x, _ in rows]), torch.stack([y for _, y in rows])


functions = {"sequence_first": sequence_first, "joined": joined}
collate = {"collate_fn": functions[name]} if name in functions else {}
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle="ignored" not in name, **collate)
names = [f"row {index}" for index in range(150)]
counted = []


def changed(epoch):
    """Returns arguments of the loss that another epoch has."""
    if name == "new_reduction":
        return {"reduction": "sum" if epoch else "mean"}
    if name == "new_weights":
        return {"weight": torch.tensor([1.0, 2.0, 3.0, 4.0]) if epoch else None}
    if name == "other_weights":
        return {"weight": torch.tensor([1.0, 1.0, 1.0, 4.0 if epoch else 1.0])}
    return {}


def loss_of(out, y, epoch=0):
    if name == "sum":
        return functional.cross_entropy(out, y, reduction="sum")  # sum
    if name == "masked_mean":
        mask = (y > 0).to(out.dtype)
        return (functional.cross_entropy(out, y, reduction="none") * mask).sum() / mask.sum()  # masked_mean
    if name == "class_weights":
        return functional.cross_entropy(out, y, weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))  # class_weights
    if name == "negatives":
        return functional.cross_entropy(out @ out.T, torch.arange(len(out)))  # negatives
    if name == "sequence_first":
        return out.softmax(0).var(0).mean()  # sequence_first
    if name == "ignored_of_copies":
        y = y.clone()
    return functional.cross_entropy(out, y, **changed(epoch))  # changed


def train():
    center = torch.zeros(4)
    for epoch in range(2):
        for number, (x, y) in enumerate(loader):  # loader
            optimizer.zero_grad()
            out = model(x if name in functions else x.mean(1))
            if name == "joined":
                out = out.view(len(y), -1, 4).mean(1)
            if name == "running_mean":
                center, out = 0.9 * center + 0.1 * out.mean(0).detach(), out - center  # running_mean
            if name == "vmapped":
                out = out + torch.func.vmap(torch.tanh)(out)
            loss = loss_of(out, y, epoch)
            if name == "new_loss" and epoch:
                loss = loss + (out**2).mean()  # new_loss
            if name == "rows_read":
                counted.extend(out.argmax(1).tolist())  # rows_read
            if name == "unknown_rule":
                middle = out.median()  # unknown_rule
                if number > 2:
                    middle.item()
            if name == "unseen" and number == 3:
                out.max().item()  # unseen
            if name == "selected":
                counted.append((out.argmax(1) == y).nonzero().size(0))  # selected
            if name == "one_row":
                counted.append(y[0].item())  # one_row
            if name == "diverged":
                counted.extend(loss.item() for _ in list(out))  # diverged
            if name == "length_of_list":
                counted.append(len(list(out)) * loss.item())  # length_of_list
            if name == "new_function" and epoch:
                loss = (2 * loss + 1).log()  # new_function
            if name == "new_scale" and epoch:
                loss = loss * x.size(0) / 32  # new_scale
            if name == "selected_mean":  # of nothing, while the step is proven
                found = y[y >= (4 if number < 4 else 1)]
                counted.append((found > 1).double().mean().item())  # selected_mean
            if name == "unequal_shapes":  # later, one row has a class of its own
                found = torch.where(x[:, 0, 0] == inputs[:, 0, 0].max(), 9, y) if epoch else y
                counted.extend(torch.bincount(found).tolist())  # unequal_shapes
            if name == "first_rows":  # of each part as many as of the whole batch
                counted.extend((y[:4] > 4).reshape(2, 2).sum(0).tolist())  # first_rows
            least = 4 if number < 4 else 1  # no row has more while the step is proven
            if name == "sum_of_first_rows":
                counted.append((y[:4] > least).sum().item())  # sum_of_first_rows
            if name == "sum_of_half":
                counted.append((y[: x.size(0) // 2] > least).sum().item())  # sum_of_half
            if name == "sum_loss":  # which is 0 at first, as a mean would be
                scale = float(number > 3)
                counted.append(functional.mse_loss(out * scale, 0 * out, reduction="sum").item())  # sum_loss
            if name == "own_gradients":
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()  # own_gradients
                continue
            loss.backward()  # backward
            optimizer.step()


def train_with_two():
    others = iter(loader)
    for x, y in loader:
        more, expected = next(others)
        optimizer.zero_grad()
        (loss_of(model(x.mean(1)), y) + loss_of(model(more.mean(1)), expected)).backward()
        optimizer.step()  # two_loaders


if name == "two_loaders":
    train_with_two()
elif name == "nothing":
    out = model(inputs.mean(1))
    functional.cross_entropy(out, targets).backward()
    optimizer.step()
else:
    train()
