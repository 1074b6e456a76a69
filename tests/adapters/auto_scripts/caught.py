"""Trains with a loss that cannot be split, catches the error, trains with another one, and prints weights."""

import torch

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
y = x.sum(1, keepdim=True)


def train(reduction):
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for rows, expected in loader:
            optimizer.zero_grad()
            losses.append(torch.nn.functional.mse_loss(model(rows), expected, reduction=reduction))
            losses[-1].backward()
            optimizer.step()
    return model.weight.tolist()


losses = []
try:
    train("sum")
except NotImplementedError:
    print("caught", flush=True)
first = losses[0].item()
print("weights", [train("mean"), first, losses[0].item(), losses[-1].item()], flush=True)
