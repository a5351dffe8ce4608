"""The model, its training and its data: random pictures of the shape of CIFAR-10, so nothing is downloaded."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_EXAMPLES = 640


class Net(nn.Module):
    """A small CNN, adapted from "PyTorch: A 60 Minute Blitz", with a batch normalization."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.norm = nn.BatchNorm2d(6)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        """Return logits (n, 10) of pictures (n, 3, 32, 32)."""
        x = self.pool(F.relu(self.norm(self.conv1(x))))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """Return the train and test loaders of a partition. Later partitions are smaller."""
    num_examples = NUM_EXAMPLES // num_partitions // (partition_id + 1)
    rng = torch.Generator().manual_seed(partition_id)
    labels = torch.randint(0, 10, (num_examples,), generator=rng)
    pictures = torch.rand((num_examples, 3, 32, 32), generator=rng)
    # The class is a bright band, so there is something to learn.
    for index, label in enumerate(labels.tolist()):
        pictures[index, :, 3 * label : 3 * label + 3] += 1.0
    num_train = num_examples * 4 // 5
    train = TensorDataset(pictures[:num_train], labels[:num_train])
    test = TensorDataset(pictures[num_train:], labels[num_train:])
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=batch_size)


def train(net, trainloader, epochs, lr, device):
    """Train the model, and return the mean loss of a batch."""
    net.to(device)
    criterion = torch.nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net, testloader, device):
    """Return the mean loss of a batch and the accuracy."""
    net.to(device)
    net.eval()
    criterion = torch.nn.CrossEntropyLoss()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images.to(device))
            loss += criterion(outputs, labels.to(device)).item()
            correct += (torch.max(outputs, 1)[1] == labels.to(device)).sum().item()
    return loss / len(testloader), correct / len(testloader.dataset)
