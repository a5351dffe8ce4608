"""What a device and the datacenter share: tensors, grid, codecs, Bundles, Versions, quantization, runtimes."""
