"""A loop whose iterator lives for as long as the interpreter does, with a step that was not ended."""

import builtins

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
inputs = torch.randn(64, 10)
model = nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=32)
for epoch in range(2):
    batches = iter(loader)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if epoch:
            break
        optimizer.step()
builtins.batches = batches  # the names of all modules are None before this one is dropped
