"""A Flower app in PyTorch, of the form of Flower's quickstart-pytorch: ClientApp, ServerApp and task."""
