"""The datacenter: training under torchrun on a mesh, and publishing into a Run."""
