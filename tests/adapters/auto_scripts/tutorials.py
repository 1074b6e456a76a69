"""Trainings in the shapes of tutorials of PyTorch, by name. The script knows nothing of sirtaki.

In float64, as rounding in float32 grows with each step. Each docstring names the tutorials of its shape.
"""

import copy
import json
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

name, path = sys.argv[1:]
torch.manual_seed(11)
torch.set_default_dtype(torch.float64)
pictures = torch.randn(45, 1, 6, 6)  # the last batch of 8 has 5 rows
labels = (pictures.mean((1, 2, 3)) > 0).long() + 2 * (pictures[:, 0, 0, 0] > 0).long()
seen, models = [], []  # numbers that the script reads, and what it trains


def batches(*tensors, **options):
    return DataLoader(TensorDataset(*tensors), **{"batch_size": 8, "shuffle": True, **options})


def kept(*trained):
    models.extend(trained)
    return trained[0] if len(trained) == 1 else trained


def classifier():
    return kept(nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)))


def look_first():
    """pytorch/tutorials: cifar10, introyt. Shows a batch, trains, shows one of the test data."""
    model, loader, test = classifier(), batches(pictures, labels), batches(pictures, labels, shuffle=False)
    shown = iter(loader)
    first, _ = next(shown)
    seen.append(first.numpy().sum())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        running = 0.0
        for number, data in enumerate(loader, 0):
            inputs, classes = data
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), classes)
            loss.backward()
            optimizer.step()
            running += loss.item()
            if number % 3 == 2:
                seen.append(running / 3)
                running = 0.0
    images, classes = next(iter(test))
    seen.extend(torch.max(model(images), 1)[1].tolist())
    validated = 0.0
    for images, classes in test:  # with gradients
        validated += functional.cross_entropy(model(images), classes)
    seen.append((validated / len(test)).item())


def loss_of_batch(model, x, y, optimizer=None):
    loss = functional.cross_entropy(model(x), y)
    if optimizer is not None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), len(x)


class Reshaped:
    """Iterates over a loader, and changes the shape of what it delivers."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for x, y in self.loader:
            yield x.view(-1, 1, 6, 6), y


def after_the_loop():
    """pytorch/tutorials: nn_tutorial. Uses the last batch after the loop, and wraps its loaders."""
    model, loader = classifier(), batches(pictures, labels)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for x, y in loader:
            loss_of_batch(model, x, y, optimizer)
    seen.extend([functional.cross_entropy(model(x), y).item(), *y.tolist(), x.size(0)])
    for x, y in loader:
        loss_of_batch(model, x, y, optimizer)
        break
    torch.manual_seed(5)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped = Reshaped(batches(pictures.flatten(1), labels))
    for x, y in wrapped:
        seen.extend(loss_of_batch(model, x, y, optimizer))
    with torch.no_grad():
        losses, rows = zip(*[loss_of_batch(model, x, y) for x, y in wrapped], strict=True)
    seen.extend([*losses, *rows])


def labels_read():
    """pytorch/examples: dcgan. Shows what the loader has delivered, inside of the loop."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for x, y in batches(pictures, labels):
        loss_of_batch(model, x, y, optimizer)
        seen.extend([*y.tolist(), x.numpy().max(), repr(y).count(",")])


def phases():
    """pytorch/tutorials: transfer_learning. Trains the last layer; both phases are one loop."""
    body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()).requires_grad_(False)
    head = kept(nn.Linear(32, 4))
    model = nn.Sequential(body, head)
    loaders = {"train": batches(pictures[:37], labels[:37]), "val": batches(pictures[37:], labels[37:])}
    optimizer = torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    best, weights = 0.0, copy.deepcopy(model.state_dict())
    for _ in range(3):
        for phase in ("train", "val"):
            model.train(phase == "train")
            total, right = 0.0, 0
            for x, y in loaders[phase]:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    out = model(x)
                    _, found = torch.max(out, 1)
                    loss = functional.cross_entropy(out, y)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                total += loss.item() * x.size(0)
                right += torch.sum(found == y.data)
            rows = len(loaders[phase].dataset)
            seen.extend([total / rows, float(right.double() / rows)])
            if phase == "train":
                scheduler.step()
            elif right.double() / rows >= best:
                best, weights = right.double() / rows, copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)


class Located(nn.Module):
    """Moves the pictures before it classifies them."""

    def __init__(self):
        super().__init__()
        self.place, self.last = nn.Linear(36, 6), nn.Linear(36, 4)
        self.place.weight.data.mul_(0.1)
        self.place.bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0]))

    def forward(self, x):
        theta = self.place(x.view(-1, 36)).view(-1, 2, 3)
        grid = functional.affine_grid(theta, x.size(), align_corners=False)
        x = functional.grid_sample(x, grid, align_corners=False)
        return functional.log_softmax(self.last(x.view(x.size(0), -1)), dim=1)


def spatial_transformer():
    """pytorch/tutorials: spatial_transformer; pytorch/examples: mnist."""
    model, loader = kept(Located()), batches(pictures, labels)
    optimizer = torch.optim.Adadelta(model.parameters(), 0.5)
    for _ in range(2):
        for number, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = functional.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if number % 2 == 0:
                seen.extend([number * len(data), loss.item()])


def two_towers():
    """pytorch/examples: siamese_network. Compares pairs of pictures."""
    tower, judge = kept(nn.Linear(36, 5), nn.Linear(10, 1))
    pairs = batches(pictures, pictures.flip(0), (labels == labels.flip(0)).double())
    optimizer = torch.optim.Adadelta([*tower.parameters(), *judge.parameters()], 0.5)
    for first, second, target in pairs:
        optimizer.zero_grad()
        both = [tower(one.view(one.size()[0], -1)) for one in (first, second)]
        out = torch.sigmoid(judge(torch.cat(both, 1))).squeeze(1)
        loss = functional.binary_cross_entropy(out, target)
        loss.backward()
        optimizer.step()
        seen.extend([loss.item(), torch.where(out > 0.5, 1, 0).eq(target).sum().item()])


def distillation():
    """pytorch/tutorials: knowledge_distillation. Divides a sum by the number of rows."""
    teacher, student = classifier(), classifier()
    optimizer = torch.optim.Adam(student.parameters(), 0.01)
    teacher.eval()
    for _ in range(2):
        total = 0.0
        for x, y in batches(pictures, labels):
            optimizer.zero_grad()
            with torch.no_grad():
                guide = teacher(x)
            out = student(x)
            soft, found = functional.softmax(guide / 2, dim=-1), functional.log_softmax(out / 2, dim=-1)
            apart = torch.sum(soft * (soft.log() - found)) / found.size()[0] * 4
            loss = 0.25 * apart + 0.75 * functional.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        seen.append(total)


class Decoder(nn.Module):
    """Begins each sequence with a word of its own."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.gru = nn.GRU(6, 6, batch_first=True)

    def forward(self, outputs, hidden, target):
        size, found = outputs.size(0), []
        word = torch.empty(size, 1, dtype=torch.long).fill_(0)
        for step in range(target.size(1)):
            output, hidden = self.gru(self.embedding(word), hidden)
            found.append(self.out(output))
            word = target[:, step].unsqueeze(1)
        return functional.log_softmax(torch.cat(found, dim=1), dim=-1)


def translation():
    """pytorch/tutorials: seq2seq_translation. Two models, two optimizers, a sampler."""
    sentences = torch.randint(1, 9, (45, 4))
    data = TensorDataset(sentences, sentences.flip(1))
    loader = DataLoader(data, sampler=RandomSampler(data), batch_size=8)
    embedding, encoder, decoder = kept(nn.Embedding(9, 6), nn.GRU(6, 6, batch_first=True), Decoder())
    optimizers = [torch.optim.Adam([*embedding.parameters(), *encoder.parameters()], 0.01)]
    optimizers.append(torch.optim.Adam(decoder.parameters(), 0.01))
    for _ in range(2):
        total = 0
        for x, y in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            out = decoder(*encoder(embedding(x)), y)
            loss = functional.nll_loss(out.view(-1, out.size(-1)), y.view(-1))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            total += loss.item()
        seen.append(total / len(loader))


class Coarse(Dataset):
    """Pictures, and these at half the size, which other processes compute."""

    def __len__(self):
        return len(pictures)

    def __getitem__(self, index):
        return functional.avg_pool2d(pictures[index], 2), pictures[index]


def super_resolution():
    """pytorch/examples: super_resolution. Several processes load the data."""
    model = kept(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.PixelShuffle(2)))
    loader = DataLoader(Coarse(), batch_size=8, shuffle=True, num_workers=2)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for number, batch in enumerate(loader, 1):
        x, target = batch[0], batch[1]
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), target)
        seen.extend([number, loss.item()])
        loss.backward()
        optimizer.step()


globals()[name]()
parameters = [one.tolist() for model in models for one in model.parameters()]
with open(path, "w") as file:
    json.dump({"seen": [float(one) for one in seen], "parameters": parameters}, file)
