"""Models whose code uses numbers of rows, or calls that torch does not show, by name; nothing of sirtaki."""

import json
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

name, path = sys.argv[1:]
torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
inputs = torch.randn(49 if name == "one_left" else 53, 6, 8)
targets = (inputs.mean((1, 2)) > 0).long()
loader = DataLoader(TensorDataset(inputs, targets), batch_size=12, shuffle=True)  # the last has 5 rows, or 1
seen = []  # numbers that the script reads


def elements(x):
    """Returns sizes that count rows or not: the parts of 2 ranks have as many rows as steps."""
    return [x.size(0), x.numel()]


class Scaled(torch.autograd.Function):
    """Multiplies rows with weights."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum((0, 1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.first = nn.Parameter(torch.zeros(1, 1, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.memory = nn.LSTM(8, 8, batch_first=True)
        self.last = nn.Linear(8, 2)
        self.signs = nn.Embedding(2, 8, sparse=name == "sparse")
        self.register_buffer("rows", torch.zeros(()))
        self.register_buffer("center", torch.zeros(6, 8))

    def forward(self, x):
        return self.last(getattr(self, name)(x).mean(1))

    def own_function(self, x):
        return Scaled.apply(x, self.weight)

    def first_token(self, x):
        rows = x.shape[0]
        return self.encoder(torch.cat([self.first.expand(rows, -1, -1), x], 1))

    def padded(self, x):
        rows, steps, _ = x.shape
        is_padding = torch.zeros(rows, steps, dtype=torch.bool)
        is_padding[:, 4:] = True
        return self.encoder(x, src_key_padding_mask=is_padding)

    def recurrent(self, x):
        rows = x.size(0)
        return self.memory(x, (torch.zeros(1, rows, 8), x.new_zeros(1, rows, 8)))[0]

    def checkpointed(self, x):
        return checkpoint(self.encoder, x, use_reentrant=False)

    def flattened(self, x):
        rows, steps, width = x.shape
        flat = torch.tanh(x.reshape(rows * steps, width))
        seen.append(flat.size(0))
        return flat.view(rows, steps, width)

    one_left = flattened

    def one_helper(self, x):
        steps_first = x.transpose(0, 1)
        flat = steps_first.reshape(-1, 8)
        for tensor in (x, steps_first, flat):
            seen.extend(elements(tensor))
        return x

    def sparse(self, x):
        return x + self.signs((x.mean(2) > 0).long())

    def counting(self, x):
        self.rows.add_(x.size(0))
        return x

    def centred(self, x):
        """Subtracts the running mean of earlier batches."""
        result = x * self.weight - self.center
        self.center.lerp_((x * self.weight.detach()).mean(0), 0.1)
        return result

    def penalised(self, x):
        return x


def train():
    model = Model()
    kind = torch.optim.SGD if name == "sparse" else torch.optim.AdamW
    optimizer = kind(model.parameters(), 0.01)
    hits = torch.zeros(2, 3)
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = functional.cross_entropy(out, y, reduction="sum") / len(x)
            if name == "penalised":
                (1e-3 * sum((parameter**2).sum() for parameter in model.parameters())).backward()
            loss.backward()
            optimizer.step()
            hits[0, epoch] += (out.argmax(1) == y).sum()
            hits[1][epoch].add_(loss.detach())
            seen.append(loss.item())
    seen.extend([*hits[0].tolist(), *hits[1].tolist(), float(model.rows), *model.center[0].tolist()])
    return model


parameters = [parameter.tolist() for parameter in train().parameters()]
with open(path, "w") as file:
    json.dump({"seen": seen, "parameters": parameters}, file)
