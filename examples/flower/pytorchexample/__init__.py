"""Flower's quickstart-pytorch: a Flower app."""
