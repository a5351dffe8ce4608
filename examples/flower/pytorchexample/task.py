"""The model, its training and evaluation, and the data of a node: random pictures of the shape of CIFAR-10."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

NUM_EXAMPLES = 640
NUM_CLASSES = 10


class Net(nn.Module):
    """Two convolutions and three linear layers, for pictures (n, 3, 32, 32)."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(16 * 5 * 5, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, NUM_CLASSES)
        )

    def forward(self, pictures):
        """Return the logits (n, 10)."""
        return self.classifier(self.features(pictures).flatten(1))


def pictures(num_examples, seed):
    """Return pictures and their labels. The label is the place of a bright band, so there is something to learn."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, NUM_CLASSES, (num_examples,), generator=rng)
    images = torch.rand((num_examples, 3, 32, 32), generator=rng)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 3 * label : 3 * label + 3] += 1.0
    return TensorDataset(images, labels)


def load_data(partition_id, num_partitions, batch_size):
    """Return the loaders of a node's training part, four fifths of its pictures, and of the rest."""
    examples = pictures(NUM_EXAMPLES // num_partitions, seed=partition_id)
    num_train = len(examples) * 4 // 5
    train, validation = Subset(examples, range(num_train)), Subset(examples, range(num_train, len(examples)))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(validation, batch_size=batch_size)


def train(net, loader, epochs, lr, device):
    """Train the model in place, and return the mean loss of its examples."""
    net.to(device).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    total = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
    return total / (epochs * len(loader.dataset))


@torch.no_grad()
def evaluate(net, loader, device):
    """Return the mean loss and the accuracy of the examples."""
    net.to(device).eval()
    loss = num_correct = 0.0
    for images, labels in loader:
        logits, targets = net(images.to(device)), labels.to(device)
        loss += nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        num_correct += (logits.argmax(1) == targets).sum().item()
    return loss / len(loader.dataset), num_correct / len(loader.dataset)
