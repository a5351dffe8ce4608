"""Flower's side of the comparison: FedAvg over clients that send fresh random arrays."""
